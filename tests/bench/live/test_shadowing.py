"""What `bench chaos --part shadow` makes of answers whose worker was killed."""

import pytest

from bench.kit.load import Answer
from bench.live.shadowing import ANSWER_TOKENS, Pauses, figures


def answer(event_s: list[float], *, tokens: int = ANSWER_TOKENS, text: str = "a") -> Answer:
    return Answer(0.0, event_s=event_s, completion_tokens=tokens, pieces=[text], choices=[0])


def test_a_pause_is_told_in_seconds_and_in_steps_of_its_answer() -> None:
    one = Pauses()
    one.take(answer([1.0, 1.1, 1.2, 1.3, 1.8, 1.9]), killed_s=1.35, wanted="a")
    assert one.pauses_s == [pytest.approx(0.5)] and one.steps == [pytest.approx(5.0)]
    found = figures({"shadow": one, "unshadowed": Pauses()})
    assert found["pause_p99_s_shadow_4k"] == pytest.approx(0.5)
    assert found["pause_p99_steps_shadow_4k"] == pytest.approx(5.0)
    assert "pause_p99_s_unshadowed_4k" not in found and found["unshadowed_lost"] == 0


def test_what_is_lost_or_changed_is_counted() -> None:
    one = Pauses()
    one.take(answer([1.0, 2.0, 3.0], tokens=3), killed_s=1.5, wanted="a")
    one.take(answer([1.0, 2.0, 3.0], text="b"), killed_s=2.5, wanted="a")
    assert (one.lost, one.changed, len(one.pauses_s)) == (1, 1, 1)
