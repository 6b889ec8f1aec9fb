"""`python -m bench dgfm`: what settling cycles of debts brings, simulated, and how fast cycles are found."""
