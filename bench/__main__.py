"""`python -m bench NAME [--quick] [--json FILE|-] [--out DIR]`, `python -m bench --list`, `… data`."""

import signal
import sys

from bench.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # The stacks that it started end as well.
    sys.exit(main())
