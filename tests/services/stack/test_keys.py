"""`keys`: what is written has hashes only, and what is revoked or not there is said."""

import json
from pathlib import Path

import pytest

from services.stack import cli
from shared import key_file
from shared.errors import ConfigError


def keys(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> tuple[int, str]:
    code = cli.main(["keys", "--run-dir", str(run), *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_added_listed_and_revoked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, key = keys(capsys, tmp_path, "add", "team-a", "--class", "guaranteed", "--max-concurrent", "3")
    key = key.strip()
    assert code == 0 and key.startswith("sk-") and len(key) == 51
    file = tmp_path / "keys.json"
    assert file.stat().st_mode & 0o777 == 0o600 and key not in file.read_text()
    assert json.loads(file.read_text())["keys"]["team-a"] == {
        "sha256": key_file.digest_of(key),
        "class": "guaranteed",
        "max_concurrent": 3,
    }
    code, said = keys(capsys, tmp_path, "list")
    assert code == 0 and "team-a" in said and "max_concurrent 3" in said and key not in said
    code, said = keys(capsys, tmp_path, "add", "team-a")
    assert code == 2 and "revoke it first" in said
    assert keys(capsys, tmp_path, "revoke", "team-a")[0] == 0
    code, said = keys(capsys, tmp_path, "revoke", "team-a")
    assert code == 2 and "there is no key 'team-a'" in said
    assert keys(capsys, tmp_path, "add", "no name")[0] == 2


def test_a_plain_key_is_read_and_can_be_hashed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    file.write_text(json.dumps({"keys": {"old": {"key": "sk-plain", "weight": 2}}}))
    expected = {"old": {"sha256": key_file.digest_of("sk-plain"), "weight": 2}}
    assert key_file.read(file) == expected
    code, said = keys(capsys, tmp_path, "--file", str(file), "hash")
    assert code == 0 and "hashed: old" in said and "sk-plain" not in file.read_text()
    assert key_file.read(file) == expected and key_file.hash_plain(file) == []


@pytest.mark.parametrize("content", ["", "[]", '{"keys": []}', '{"keys": {"a": 1}}', "\x00"])
def test_what_is_no_file_of_keys_is_said(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="file of keys"):
        key_file.read(file)
    assert key_file.read(tmp_path / "none.json") == {}
