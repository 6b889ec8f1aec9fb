"""Engines that compute tokens. They do not depend on sequences, plans, the bus or the scheduler."""
