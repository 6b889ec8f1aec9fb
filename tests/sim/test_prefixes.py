"""What simulated workers keep of prompts, and what a fleet that routes by it finds."""

from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.worker.core.costs import find_cost
from shared.blocks import HASH_BYTES, BlockHash
from sim.predictors import find_predictor
from sim.prefixes import SimPrefixes
from sim.requests import SimRequest
from sim.routers import find_router
from sim.setup import Outcome, Setup
from sim.simulation import Simulation

BLOCK = 64


def names(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(number.to_bytes(HASH_BYTES, "big") for number in numbers)


def test_the_beginning_stays_longest_and_placement_is_told() -> None:
    prefixes = SimPrefixes(["w"], 3, BLOCK)
    prefixes.keep("w", names(1, 2, 3))
    assert prefixes.find("w", names(1, 2, 9)) == 2 * BLOCK
    prefixes.keep("w", names(8))
    assert prefixes.find("w", names(1, 2, 3)) == 2 * BLOCK, "the third was used longest ago"
    assert sum(prefixes.expected("w", names(1, 2, 3), 0.0)) == 2 * BLOCK
    prefixes.index.check_integrity()


def served(router: str) -> Outcome:
    requests = [
        SimRequest(at, 2.0 * at, 4 * BLOCK + 5, 8, 16, names=names(*(100 * (at % 3) + n for n in range(4))))
        for at in range(24)
    ]
    setup = Setup(
        policy="kvasir",
        shape=WorkerShape(16, 200),
        settings=PolicySettings(),
        cost=find_cost("opt-13b-a100"),
        predictor=find_predictor("oracle", seed=0, train=[]),
        workers=4,
        router=find_router(router),
        cache_blocks=12,
        cache_block_tokens=BLOCK,
        is_checked=True,
    )
    return Simulation(setup, requests).run()


def test_what_is_found_is_not_computed_again() -> None:
    ours, turns = served("prefix_aware"), served("round_robin")
    found = [record.cached_tokens for record in ours.records]
    assert found[:3] == [0, 0, 0] and found[3:] == [4 * BLOCK] * 21
    assert all(record.expected_tokens == record.cached_tokens for record in ours.records)
    assert sum(record.cached_tokens for record in turns.records) < sum(found)
    first_s = [record.first_token_s - record.request.arrival_s for record in ours.records]
    assert max(first_s[3:]) < min(first_s[:3])
