"""What is buried stays away for a while."""

from services.worker.core.tombstones import Tombstones
from tests.services.worker.builders import ref


def test_a_tombstone_covers_this_attempt_and_lower_ones() -> None:
    tombstones = Tombstones(retention_s=60.0)
    tombstones.bury(ref("a", attempt=2), 0.0)
    tombstones.bury(ref("a", attempt=1), 1.0)
    assert [tombstones.covers(ref("a", attempt=n)) for n in (1, 2, 3)] == [True, True, False]
    assert not tombstones.covers(ref("a", attempt=1, choice=1)) and not tombstones.covers(ref("b"))


def test_it_is_forgotten_after_its_time() -> None:
    tombstones = Tombstones(retention_s=60.0)
    tombstones.bury(ref("a"), 0.0)
    tombstones.bury(ref("b"), 50.0)
    tombstones.expire(60.0)
    assert tombstones.covers(ref("a"))
    tombstones.expire(60.5)
    assert not tombstones.covers(ref("a")) and tombstones.covers(ref("b"))


def test_burying_again_renews_it() -> None:
    tombstones = Tombstones(retention_s=60.0)
    tombstones.bury(ref("a"), 0.0)
    tombstones.bury(ref("b"), 10.0)
    tombstones.bury(ref("a"), 50.0)
    tombstones.expire(80.0)
    assert tombstones.covers(ref("a")) and not tombstones.covers(ref("b"))


def test_their_number_is_bounded() -> None:
    tombstones = Tombstones(retention_s=60.0, most=3)
    for name in "abcd":
        tombstones.bury(ref(name), 0.0)
    assert len(tombstones) == 3 and not tombstones.covers(ref("a")) and tombstones.covers(ref("d"))
