"""`python -m bench dgfm --live`: four workers that borrow from each other."""
