"""Models that ship with Kvasir, and the scripts that made them."""
