"""Files appear whole or not at all."""

from pathlib import Path

import pytest

from services.predictor.samples import write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"one")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
