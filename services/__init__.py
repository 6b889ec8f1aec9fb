"""The six services, and the stack that runs them on one machine."""

import shared  # noqa: F401  # refuses a Python that cannot run this
