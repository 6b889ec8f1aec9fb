"""A discrete-event simulator that runs the live scheduler's policy objects (`docs/simulator.md`)."""

import shared  # noqa: F401  # refuses a Python that cannot run this
