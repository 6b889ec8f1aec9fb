"""A GGUF file becomes a model folder with the same tokens and configuration, or is refused in one sentence.

Keeps from coming back: a traceback of a library about a file that a download left half done."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.text.templates import check_template
from services.gateway.text.tokenizer import load_codec
from shared.errors import ConfigError
from shared.gguf_files import WEIGHTS, folder_of, read_header
from shared.model_files import check_model, name_of, source_of
from tests import gguf_rig

TINY_CHAT = Path("models/tiny_chat")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVASIR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_is_a_model_like_its_folder(tmp_path: Path) -> None:
    file = gguf_rig.of_folder(tmp_path / "Tiny.Q8_0.gguf", TINY_CHAT, "Q8_0")
    folder = source_of(str(file))
    assert isinstance(folder, Path) and (folder / WEIGHTS).resolve() == file
    assert name_of(str(file)) == "Tiny.Q8_0"
    check_model(str(file))
    check_template(str(file))
    ours, theirs = load_codec(str(file)), load_codec(str(TINY_CHAT))
    chat = [{"role": "user", "content": "Add 12 and 345, naïvely…\n\n  Then stop."}]
    prompt = theirs.chat_template.render(chat)
    assert ours.chat_template.render(chat) == prompt
    assert ours.encode_text(prompt, add_special_tokens=False) == theirs.encode_text(
        prompt, add_special_tokens=False
    )
    assert (ours.end_token_ids, ours.vocab_size) == (theirs.end_token_ids, theirs.vocab_size)
    config, own = (json.loads((each / "config.json").read_text()) for each in (folder, TINY_CHAT))
    for name in ("hidden_size", "num_key_value_heads", "head_dim", "rope_parameters", "tie_word_embeddings"):
        assert config[name] == own[name], name


def test_a_folder_is_made_once_and_anew_for_a_changed_file(tmp_path: Path) -> None:
    file = gguf_rig.of_folder(tmp_path / "a.gguf", TINY_CHAT)
    first = folder_of(str(file))
    made_ns = (first / "config.json").stat().st_mtime_ns
    assert folder_of(str(file)) == first and (first / "config.json").stat().st_mtime_ns == made_ns
    gguf_rig.of_folder(file, TINY_CHAT, "Q4_0")
    assert folder_of(str(file)) != first


@pytest.mark.parametrize("kept", [0, 3, 20, 100, 5_000, 100_000, -1])
def test_a_file_cut_anywhere_is_refused_before_anything_is_loaded(tmp_path: Path, kept: int) -> None:
    file = gguf_rig.of_folder(tmp_path / "a.gguf", TINY_CHAT)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"a\.gguf is (cut short|no GGUF file).* again$"):
        source_of(str(file))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"general__architecture": "rwkv7"},
            "has the architecture rwkv7, and GGUF files are read of llama, ",
        ),
        ({"llama__expert_count": 8}, "has the architecture llama with experts"),
        ({"tokenizer__ggml__pre": "glyphs"}, r"a tokenizer that is not known \(gpt2, glyphs\)"),
        ({"tokenizer__ggml__model": "rwkv"}, r"a tokenizer that is not known \(rwkv, smollm\)"),
        ({"llama__embedding_length": None}, "does not state the shape"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = gguf_rig.of_folder(tmp_path / "a.gguf", TINY_CHAT, **change)
    with pytest.raises(ConfigError, match=said) as refused:
        source_of(str(file))
    assert "\n" not in refused.value.message and ": " in refused.value.message


def test_a_type_that_is_not_known_is_named(tmp_path: Path) -> None:
    import numpy as np

    tensors: dict[str, Any] = {"token_embd.weight": (39, np.zeros((4, 32), np.float32))}
    file = gguf_rig.write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama"}, tensors)
    with pytest.raises(ConfigError, match="has weights of type 39, which is not known: take a file of F32"):
        read_header(file)


def test_a_template_that_fails_can_be_replaced(tmp_path: Path) -> None:
    broken = "{{ messages[0].content | no_such_filter }}"
    file = gguf_rig.of_folder(tmp_path / "a.gguf", TINY_CHAT, tokenizer__chat_template=broken)
    with pytest.raises(
        ConfigError, match=r"the chat template of .*a\.gguf cannot be used.*write one to .*a\.jinja"
    ):
        check_template(str(file))
    for other in ("{{ messages[0].nothing.here }}", "{% for a in messages %}"):
        file.with_suffix(".jinja").write_text(other)
        with pytest.raises(ConfigError, match="cannot be used"):
            check_template(str(file))
    file.with_suffix(".jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    check_template(str(file))
    assert load_codec(str(file)).chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi"
