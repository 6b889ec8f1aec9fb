"""What papers/003 (EcoServe) prints, to stand beside what is simulated. Figures 10 to 12 and §4's text."""

Band = tuple[float, float]

RATE_BANDS: dict[tuple[str, str], Band] = {
    ("sharegpt", "vllm"): (2.5, 4.0),
    ("sharegpt", "fastgen"): (1.25, 2.25),
    ("sharegpt", "orca"): (22.0, 64.0),
    ("books", "vllm"): (2.5, 2.8),
    ("books", "fastgen"): (1.88, 2.33),
    ("books", "orca"): (12.5, 13.0),
    ("alpaca", "vllm"): (1.13, 2.14),
    ("alpaca", "fastgen"): (1.2, 1.24),
    ("alpaca", "orca"): (5.6, 9.0),
}
"""(trace, rival): sustained rate of EcoServe over the rival's, at similar normalized latency."""

SETTINGS: dict[str, dict[str, float]] = {
    "alpaca": {"pad": 0.10, "reserve_ratio": 0.012, "buffer": 0.15},
    "sharegpt": {"pad": 0.15, "reserve_ratio": 0.03, "buffer": 0.15},
    "books": {"pad": 0.20, "reserve_ratio": 0.05, "buffer": 0.10},
}
"""Of EcoServe, per trace: padding and reserve of §2.3, buffer of §4."""

BATCH_SEQUENCES = {"orca": 8, "fastserve": 8}
"""§2.1; the others are bounded by memory."""

BEST: dict[str, dict[str, float]] = {
    "pad": {"alpaca": 0.10, "sharegpt": 0.15, "books": 0.20},
    "reserve_ratio": {"alpaca": 0.02, "sharegpt": 0.03, "books": 0.04},
    "buffer": {"alpaca": 0.15, "sharegpt": 0.15, "books": 0.10},
}
"""Figure 12: where each parameter is best."""


def band(trace: str, rival: str) -> str:
    """As printed, for a table; empty where the paper says nothing."""
    found = RATE_BANDS.get((trace, rival))
    return "" if found is None else f"{found[0]:g}–{found[1]:g}"
