"""`bench audit`: flipped bits in every place where KV waits or travels, and what checking costs."""
