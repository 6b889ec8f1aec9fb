"""`models`: pulled whole or not at all, listed, removed; and what `--model` may say."""

import json
from pathlib import Path

import pytest

from services.stack import models
from services.stack.rundir import ROOT
from shared.errors import ConfigError
from shared.model_files import HubId

TINY_CHAT = ROOT / "models" / "tiny_chat"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(models.ENV_FOLDER, str(tmp_path / "home"))
    return tmp_path / "home"


def no_hub(model: HubId, target: Path) -> None:
    (target / "config.json").write_text("{}")
    raise ConfigError(f"{model} cannot be downloaded", param="model")


def test_a_folder_is_pulled_listed_and_removed(home: Path) -> None:
    assert models.known() == []
    found = models.pull(str(TINY_CHAT), None, no_hub)
    assert (found.name, found.problem) == ("tiny_chat", "") and found.size_bytes > 1e6
    models.pull(str(TINY_CHAT), "twin", no_hub)
    assert [each.name for each in models.known()] == ["tiny_chat", "twin"]
    with pytest.raises(ConfigError, match="already"):
        models.pull(str(TINY_CHAT), "twin", no_hub)
    assert models.named("twin") == ("twin", str(home / "twin"))
    assert models.remove("twin").name == "twin"
    assert [each.name for each in models.known()] == ["tiny_chat"]
    with pytest.raises(ConfigError, match="there is tiny_chat"):
        models.remove("twin")
    with pytest.raises(ConfigError, match="stay"):
        models.remove("tiny_chat")


def test_what_is_not_whole_is_not_there(home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({}))
    for source in (str(broken), "somebody/model"):
        with pytest.raises(ConfigError):
            models.pull(source, None, no_hub)
    assert not home.exists() or list(home.iterdir()) == []
    for name in ("", ".", "a/b", "../x"):
        with pytest.raises(ConfigError):
            models.remove(name)


def test_the_hubs_files_are_taken_as_they_come(home: Path) -> None:
    def hub(model: HubId, target: Path) -> None:
        for path in TINY_CHAT.iterdir():
            if path.is_file():
                (target / path.name).write_bytes(path.read_bytes())

    assert models.pull("somebody/model@v1", None, hub).name == "model"
    assert models.named("mine=model") == ("mine", str(home / "model"))
    assert models.named("somebody/other@v2") == ("other", "somebody/other@v2")
    with pytest.raises(ConfigError):
        models.named("mine=")


def test_a_link_keeps_its_own_name(tmp_path: Path) -> None:
    """It is served as what the operator called it, not as what it points to."""
    (tmp_path / "mine").symlink_to(TINY_CHAT)
    assert models.named(str(tmp_path / "mine")) == ("mine", str(tmp_path / "mine"))
