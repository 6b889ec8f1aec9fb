"""The six services of Kvasir and the stack that runs them."""

import shared  # noqa: F401  # refuses a Python that cannot run this
