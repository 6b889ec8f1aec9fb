"""Reading the options that only one policy understands. Knows no policy."""

from collections.abc import Mapping

from shared.errors import ConfigError


def read_options(
    policy: str, options: Mapping[str, object], defaults: Mapping[str, float]
) -> dict[str, float]:
    """Every option of `policy`: as set, or its default. Whole numbers where the default is one; above 0.

    Raises ConfigError for a name that the policy does not know and for a value it cannot use.
    """
    for name in options:
        if name not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            raise ConfigError(f"{policy} has no option {name!r}; it has: {known}", param="policy_options")
    return {
        name: _number(policy, name, options[name], default) if name in options else default
        for name, default in defaults.items()
    }


def _number(policy: str, name: str, value: object, default: float) -> float:
    wanted = "a whole number" if isinstance(default, int) else "a number"
    fits = isinstance(value, int) or (isinstance(value, float) and isinstance(default, float))
    if isinstance(value, bool) or not fits or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(
            f"{policy}: write {wanted} above 0 for {name}, not {value!r}", param="policy_options"
        )
    return value if isinstance(default, int) else float(value)
