"""Options of a policy: as set or by default, and refused by name."""

import pytest

from services.scheduler.policy.contract import read_options
from shared.errors import ConfigError

DEFAULTS = {"levels": 5, "starve_s": 10.0}


def test_what_is_not_set_has_its_default() -> None:
    assert read_options("p", {"starve_s": 3}, DEFAULTS) == {"levels": 5, "starve_s": 3.0}


@pytest.mark.parametrize("options", [{"levels": 2.5}, {"levels": 0}, {"starve_s": "long"}, {"levels": True}])
def test_a_value_that_cannot_be_used_is_a_configuration_error(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read_options("p", options, DEFAULTS)


def test_an_unknown_name_is_a_configuration_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'level'.*levels, starve_s"):
        read_options("p", {"level": 3}, DEFAULTS)
