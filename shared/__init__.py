"""Code shared by all services. Importing it exits if the Python version or environment cannot run them."""

import sys
from importlib.util import find_spec

_OLDEST_PYTHON = (3, 11)

if sys.version_info < _OLDEST_PYTHON:
    sys.exit("error: Kvasir needs Python 3.11 or later, and this is {}.{}".format(*sys.version_info))
if find_spec("msgspec") is None:
    sys.exit(
        f"error: this Python ({sys.executable}) has none of the packages that Kvasir needs; "
        "`make up` installs them for .venv/bin/python"
    )
