"""What is measured: `python -m bench NAME`. It may import services and shared; nobody imports it."""

import shared  # noqa: F401  # refuses a Python that cannot run this
