"""`python -m bench bulk`: speed of the transports of the bulk plane."""
