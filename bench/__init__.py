"""Benchmarks: `python -m bench NAME`. They import services and shared; nothing imports them."""

import shared  # noqa: F401  # refuses a Python that cannot run this
