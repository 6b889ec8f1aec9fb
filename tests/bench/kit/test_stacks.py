"""A stack as benches start it; whole ones are in the benches' own tests."""

from bench.kit.stacks import _find


def test_status_is_searched_to_the_bottom() -> None:
    document = {"services": [{"details": {"a": 1}}, {"details": {"engine_s": 2.0, "between_steps_s": 0.5}}]}
    assert _find(document, "engine_s") == {"engine_s": 2.0, "between_steps_s": 0.5}
    assert _find(document, "nothing") is None
