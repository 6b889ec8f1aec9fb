"""How hard the code is to enter, counted."""
