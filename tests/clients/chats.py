"""What every client is made to say."""

FIRST = "Tell me a short story about a dog."
SECOND = "Thank you! What was it about?"
OVERLONG = "word " * 20_000
"""Beyond every context, and short enough for one argument of a command line."""
UNKNOWN_MODEL = "no_such_model"
WRONG_KEY = "sk-wrong"
MAX_TOKENS = 40
