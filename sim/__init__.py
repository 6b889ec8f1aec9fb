"""A discrete-event simulator around the same policy objects that the live scheduler runs
(`docs/simulator.md`).
"""
