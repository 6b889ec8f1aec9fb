"""A model's folder or hub id is judged before anything is loaded, in a sentence that says what to do.

Keeps from coming back: a library's tracebacks about a truncated file, and mistyped folders that are looked
for on the hub for a minute.
"""

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from shared.errors import ConfigError
from shared.model_files import HubId, check_model, name_of, revision_advice, source_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": numpy.zeros(1000, numpy.float32)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_whole_folder_passes(folder: Path) -> None:
    check_model(str(folder))
    check_model("models/tiny_chat")


@pytest.mark.parametrize("kept_bytes", [4050, 60, 8, 3, 0])
def test_weights_cut_anywhere_are_found(folder: Path, kept_bytes: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(ConfigError, match=r"model\.safetensors is (cut short, |no safetensors file).* again"):
        check_model(str(folder))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", None, "it has no config.json"),
        ("config.json", "{", "config.json is no JSON"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "b.safetensors"}}), "lacks b.safet"),
    ],
)
def test_what_is_missing_is_named(folder: Path, file: str, text: str | None, said: str) -> None:
    (folder / file).unlink(missing_ok=True)
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=said):
        check_model(str(folder))


def test_ids_may_name_a_revision() -> None:
    assert source_of("org/name@v1.2") == HubId("org/name", "v1.2")
    assert source_of("org/name") == HubId("org/name", None)
    assert name_of("org/name@v1.2") == "name"
    with pytest.raises(ConfigError, match="write the revision after the @"):
        source_of("org/name@")


def test_who_names_no_revision_is_told_which_it_was() -> None:
    assert revision_advice(HubId("org/name", "v1"), "0123abc") is None
    advice = revision_advice(HubId("org/name", None), "0123abc")
    assert advice is not None and "now it is 0123abc: write org/name@0123abc to keep it" in advice


@pytest.mark.parametrize("model", ["models/tiny_chatt", "./nope", "/nope", "~/nope", "a/b/c"])
def test_a_mistyped_folder_is_no_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        check_model(model)
