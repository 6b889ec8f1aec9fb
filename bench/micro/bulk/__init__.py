"""`python -m bench bulk`: how fast each transport of the bulk plane moves bytes."""
