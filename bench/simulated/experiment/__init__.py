"""`python -m bench experiment`: a grid from a YAML file, live or simulated."""
