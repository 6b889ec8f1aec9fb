"""`srtf`: the shortest remaining runs, whoever ran before."""

from services.scheduler.policy.contract import PolicySettings
from services.scheduler.policy.research.ranked import SrtfPolicy
from tests.services.scheduler.policy.batch_rig import rig


def test_the_shorter_starts_first_however_late_it_came() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_batch_sequences=1, max_steps=1), blocks=64, lag=0)
    for name, length in (("a", 20), ("b", 10), ("c", 5)):
        bench.arrive(name, 8, length, 40, length)
    bench.finish()
    assert [key[0] for key in bench.started] == ["c", "b", "a"]


def test_a_shorter_one_takes_the_place_and_the_other_goes_on_where_it_was() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_batch_sequences=1, max_steps=1), blocks=64, lag=0)
    long = bench.arrive("a", 8, 20, 40, 20)
    for _ in range(4):
        bench.turn()
    bench.arrive("b", 8, 3, 40, 3)
    bench.turn()
    held = long.blocks
    assert bench.batches[-1].prefills[0].key[0] == "b" and bench.batches[-1].decodes == ()
    assert bench.batches[-1].preemptions == () and held > 0, "it pauses with its blocks"
    bench.finish()
    assert sum(len(batch.prefills) for batch in bench.batches) == 2, "nothing is computed twice"


def test_where_blocks_are_short_the_longest_gives_up_its_own() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_steps=1), blocks=24, lag=0)
    bench.arrive("a", 8, 30, 33, 30)
    bench.arrive("b", 8, 25, 33, 25)
    bench.turn()
    bench.arrive("c", 8, 3, 33, 3)
    bench.turn()
    assert [item.key[0] for item in bench.batches[-1].preemptions] == ["a"]
    assert [item.key[0] for item in bench.batches[-1].prefills] == ["c"]
    assert [item.key[0] for item in bench.batches[-1].decodes] == ["b"]
    bench.finish()


def test_nobody_gives_up_blocks_for_one_that_would_not_fit_even_so() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_steps=1), blocks=24, lag=0)
    bench.arrive("a", 8, 4, 65, 4)
    bench.arrive("b", 8, 30, 17, 30)
    bench.turn()
    bench.arrive("c", 8, 5, 41, 5)
    bench.turn()
    assert bench.batches[-1].preemptions == (), "b's 6 blocks would not be enough for c's 12"
    bench.finish()


def test_a_new_prediction_reorders_those_that_wait() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_batch_sequences=1, max_steps=1), blocks=64, lag=0)
    bench.arrive("a", 8, 5, 40, 5)
    bench.turn()
    bench.arrive("b", 8, 9, 40)
    bench.arrive("c", 8, 20, 40, 20)
    bench.arrive("d", 8, 30, 40, 30)
    bench.finish()
    assert [key[0] for key in bench.started] == ["a", "c", "d", "b"], "b counts as its limit of 40"


def test_a_prompt_that_is_found_stored_comes_nearer() -> None:
    """Keeps the order of those that run from being that of before the hit."""
    bench = rig(SrtfPolicy, PolicySettings(max_batch_sequences=2, token_budget=8, max_steps=1), lag=0)
    bench.stored = lambda job: 8 if job.task.prompt_tokens == 39 else 0
    bench.arrive("a", 1, 7, 7, 7)
    bench.turn()
    bench.arrive("b", 39, 1, 1, 1)
    bench.finish()
