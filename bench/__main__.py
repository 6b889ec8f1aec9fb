"""`python -m bench NAME [--quick] [--json FILE|-] [--out DIR]`, `python -m bench --list`, `… data`."""

import sys

from bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
