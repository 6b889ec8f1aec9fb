"""Where the engine's thread leaves its time: in the engine, or between iterations with work to do. Pure."""


class Occupancy:
    """Seconds since the start. Time in which nothing was there to compute counts nowhere."""

    def __init__(self) -> None:
        self.engine_s = 0.0
        self.between_s = 0.0
        """From the end of an iteration that left sequences unfinished to the beginning of the next."""
        self._ended_s: float | None = None

    def on_iteration(self, began_s: float, ended_s: float, *, is_more_to_do: bool) -> None:
        """The engine computed from `began_s` to `ended_s`; `is_more_to_do`: it will be wanted again."""
        if self._ended_s is not None:
            self.between_s += began_s - self._ended_s
        self.engine_s += ended_s - began_s
        self._ended_s = ended_s if is_more_to_do else None
