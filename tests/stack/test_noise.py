"""Whatever arrives at whatever subject, no process ends and nobody else's answer changes.

Keeps from coming back: an id "a.b" that killed placement, workers and the gateway, and whatever is like it.
"""

import logging
from collections import Counter

import pytest

from shared.config import BusConfig
from tests.stack.noisy import noisy_stack, targets

MESSAGES = 60
SEED = 18


async def test_noise_on_every_subject_changes_no_answer(
    bus_config: BusConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        outcomes = await _disturb(bus_config, MESSAGES, SEED)
    assert set(outcomes) == {"same"}, outcomes
    unforeseen = [record for record in caplog.records if record.exc_info]
    assert not unforeseen, [record.getMessage() for record in unforeseen]


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_much_noise_on_every_subject_changes_no_answer(bus_config: BusConfig) -> None:
    outcomes = await _disturb(bus_config, 1500, SEED + 1)
    assert set(outcomes) == {"same"}, outcomes


async def _disturb(bus_config: BusConfig, messages: int, seed: int) -> Counter[str]:
    async with noisy_stack(bus_config) as stack:
        await stack.learn()
        outcomes: Counter[str] = Counter()
        for number, target in enumerate(targets()):
            found = await stack.disturb(target, messages, seed * 1000 + number)
            print(f"{target}: {dict(found)}", flush=True)
            outcomes += found
    return outcomes
