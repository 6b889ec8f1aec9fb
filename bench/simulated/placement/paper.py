"""What papers/000 reports in its Figures 6 and 11–15, as far as its text gives numbers. It judges nothing."""

ROWS: tuple[tuple[str, str, str], ...] = (
    ("6", "requests that keep their KV", "23 to 60 % more with migration"),
    ("11", "GPUs saved against BF and WF", "over 20 % (abstract: 9–31 %)"),
    ("11", "GPUs saved against LB", "up to 15 %"),
    ("12", "moves against LB", "consistently fewer"),
    ("13", "moves saved by batching", "up to 30 % (Poisson), 25 % (Azure)"),
    ("14", "memory in use", "at least 88 %; others up to 80 %, BF down to 65 %"),
    ("15", "GPUs over time, most frequent arrivals", "always the fewest"),
)
