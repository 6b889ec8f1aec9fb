"""`python -m bench together`: combined benefit of the mechanisms for short memory."""
