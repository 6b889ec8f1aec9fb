"""`python -m bench papers`: the claims of five papers, measured again and against today's peers."""
