"""`python -m services up | down | status | chat`."""

from services.stack.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
