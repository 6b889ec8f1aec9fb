"""A discrete-event simulator around the same policy objects that the live scheduler runs
(`docs/simulator.md`).
"""

import shared  # noqa: F401  # refuses a Python that cannot run this
