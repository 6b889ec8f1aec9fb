"""What the seed of the stand-ins grows: says how it was started, then waits."""

import os
import sys
import time

if __name__ == "__main__":
    print("sprout", sys.argv[1:], os.environ.get("SPROUT"), "json" in sys.modules, flush=True)
    time.sleep(1000)
