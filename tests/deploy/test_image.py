"""What of an image is compared with the locks is found there."""

from pathlib import Path

from tests.compose.image import locked, unlocked


def test_what_is_not_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "runtime.txt").write_text("a-b==1.0 \\\n    --hash=sha256:00\nc[d]==2.0\n")
    (tmp_path / "torch-cpu.txt").write_text("torch==2.0+cpu\n")
    pins = locked(tmp_path)
    assert unlocked({"A_b": "1.0", "c": "2.0", "torch": "2.0+cpu", "pip": "23"}, pins) == []
    assert unlocked({"a.b": "1.1", "e": "3"}, pins) == ["a-b 1.1", "e 3"]


def test_the_locks_pin_what_serves() -> None:
    pins = locked()
    assert {"torch", "nats-py", "msgspec", "starlette"} <= pins.keys()
