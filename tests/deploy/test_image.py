"""What of an image is compared with the locks is found there."""

from pathlib import Path

from tests.compose.image import locked, security_updates, unlocked


def test_what_is_not_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "runtime.txt").write_text("a-b==1.0 \\\n    --hash=sha256:00\nc[d]==2.0\n")
    (tmp_path / "torch-cpu.txt").write_text("torch==2.0+cpu\n")
    pins = locked(tmp_path)
    assert unlocked({"A_b": "1.0", "c": "2.0", "torch": "2.0+cpu", "pip": "23"}, pins) == []
    assert unlocked({"a.b": "1.1", "e": "3"}, pins) == ["a-b 1.1", "e 3"]


def test_the_locks_pin_what_serves() -> None:
    pins = locked()
    assert {"torch", "nats-py", "msgspec", "starlette"} <= pins.keys()


def test_what_debian_mended_is_named_and_what_is_merely_newer_is_not() -> None:
    simulated = """
Inst base-files [12.4+deb12u11] (12.4+deb12u15 Debian:12.15/oldstable [amd64])
Conf base-files (12.4+deb12u15 Debian:12.15/oldstable [amd64])
Inst libssl3 [3.0.16-1] (3.0.20-1 Debian:12.15/oldstable, Debian-Security:12/oldstable-security [amd64])
Inst perl-base [5.36.0-7] (5.36.0-7+deb12u3 Debian-Security:12/oldstable-security [amd64]) []
"""
    assert security_updates(simulated) == [
        "libssl3 3.0.16-1, mended in 3.0.20-1",
        "perl-base 5.36.0-7, mended in 5.36.0-7+deb12u3",
    ]
