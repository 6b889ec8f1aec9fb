"""A queue that is full is shared by those that wait in it."""

from shared.messages.sequence import is_beyond_share


def test_nobody_is_refused_where_there_is_room() -> None:
    assert not is_beyond_share({"flood": 9}, "flood", 10)


def test_who_has_less_than_his_share_of_a_full_queue_may_have_more() -> None:
    full = {"flood": 9, "a": 1}
    assert is_beyond_share(full, "flood", 10)
    assert not is_beyond_share(full, "a", 10) and not is_beyond_share(full, "new", 10)
    assert is_beyond_share({"flood": 9, "a": 5}, "a", 10)


def test_there_is_an_end_to_it() -> None:
    assert is_beyond_share({str(name): 1 for name in range(20)}, "new", 10)
