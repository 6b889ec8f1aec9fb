"""`bench audit`: detection of flipped bits wherever KV is stored or sent, and the cost of checks."""
