"""The same requests for every side; a file of one's own."""

from itertools import islice
from pathlib import Path

from bench.kit.models import TINY_CHAT
from bench.live.pie.workload import MOST_TOKENS, Workload


def test_every_side_gets_the_same_and_a_trained_model_ends_by_itself() -> None:
    workload = Workload(str(TINY_CHAT), 3)
    first, again = (list(islice(workload.requests(), 20)) for _ in range(2))
    assert first == again
    assert {each.max_tokens for each in first} == {MOST_TOKENS} and all(each.end_token_ids for each in first)
    assert first != list(islice(Workload(str(TINY_CHAT), 4).requests(), 20))


def test_random_weights_answer_as_long_as_the_text_does_and_beginnings_are_spread() -> None:
    workload = Workload("random-50m", 3)
    whole, spread = (list(islice(workload.requests(count), 60)) for count in (0, 30))
    assert len({each.max_tokens for each in whole}) > 10 and not whole[0].end_token_ids
    assert all(a.max_tokens >= b.max_tokens for a, b in zip(whole, spread, strict=True))
    assert sum(a != b for a, b in zip(whole, spread, strict=True)) > 20 and whole[30:] == spread[30:]
    assert 60 < workload.mean_tokens() < 250


def test_a_file_is_repeated(tmp_path: Path) -> None:
    trace = tmp_path / "chats.jsonl"
    trace.write_text('{"prompt": "Who is it?", "response": "It is me, and you know it."}\n')
    first, second = islice(Workload("random-50m", 0, trace).requests(), 2)
    assert first == second and first.max_tokens >= 8
