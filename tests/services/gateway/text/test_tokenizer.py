"""The codec gives the ids that transformers gives, from the files that transformers reads. Work in threads:
its result, its error, and a bound on what waits."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from services.gateway.text.tokenizer import (
    AT_ONCE_BYTES,
    MAX_WAITING_BYTES,
    ChatTemplate,
    Codec,
    TokenizerThreads,
    Vocabulary,
    load_codec,
)
from shared.errors import ConfigError, InvalidRequest, Overloaded
from tests.services.gateway.conftest import ANSWER, TEMPLATE, encode_chat

CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": " be nice "}, {"role": "user", "content": "häß 日本語 😀\n\n<|end|>"}],
    [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", ""), ("user", "b"))],
]


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def assert_same(folder: Path) -> Codec:
    """Chats and texts get the ids that transformers gives them."""
    codec = load_codec(str(folder))
    theirs = AutoTokenizer.from_pretrained(str(folder))
    for chat in CHATS:
        encoding: Any = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
        assert encode_chat(codec, chat) == encoding["input_ids"]
    for text in ("hello world", "", "  x", "<|user|>hi"):
        assert codec.encode_text(text) == theirs(text)["input_ids"]
    return codec


def test_the_same_ids_as_transformers(model_folder: Path) -> None:
    assert_same(model_folder)


def test_the_template_in_a_file_of_its_own_or_one_of_several(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    change(folder / "tokenizer_config.json", chat_template=named)
    assert_same(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<|assistant|>", "<|assistant|>\nSo: "))
    assert_same(folder)


def test_an_older_folder_without_tokenizer_json(model_folder: Path, tmp_path: Path) -> None:
    whole = json.loads((model_folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(whole["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in whole["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 400}))
    assert_same(tmp_path)


def test_what_ends_an_answer(folder: Path) -> None:
    assert load_codec(str(folder)).end_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load_codec(str(folder)).end_token_ids == (2, 5)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    assert load_codec(str(folder)).end_token_ids == (2,)


def test_what_cannot_be_loaded_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_codec(str(tmp_path / "nowhere"))
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is no JSON"):
        load_codec(str(folder))


def test_the_gateway_starts_without_torch(model_folder: Path) -> None:
    code = (
        "import sys, services.gateway.service as s, services.gateway.text.tokenizer as t\n"
        f"t.load_codec({str(model_folder)!r})\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


LARGE = AT_ONCE_BYTES + 1


async def test_what_waits_is_bounded_and_little_is_done_at_once() -> None:
    threads = TokenizerThreads(1, 2)
    release = threading.Event()
    waiting = [asyncio.create_task(threads.encode(lambda: release.wait(10), LARGE)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await threads.encode(lambda: 1, LARGE)
    here = threading.current_thread().name
    assert await threads.encode(lambda: threading.current_thread().name, AT_ONCE_BYTES) == here
    release.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await threads.encode(lambda: threading.current_thread().name, LARGE) == "tokenizer_0"
    threads.close()


async def test_what_waits_is_bounded_in_bytes_too() -> None:
    """Two thousand bodies of four megabytes are few requests and much memory."""
    threads = TokenizerThreads(1, 2048)
    release = threading.Event()
    first = asyncio.create_task(threads.encode(lambda: release.wait(10), MAX_WAITING_BYTES - LARGE))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="try again"):
        await threads.encode(lambda: 1, LARGE + 1)
    second = asyncio.create_task(threads.encode(lambda: 2, LARGE))
    release.set()
    assert (await first, await second) == (True, 2)
    assert await threads.encode(lambda: 3, 2 * MAX_WAITING_BYTES) == 3, "one alone is taken whatever its size"
    threads.close()


async def test_one_body_is_read_at_a_time_and_then_its_reader_rests_for_as_long() -> None:
    """Thirty bodies of four megabytes, one right after the other, kept the interpreter from the event loop
    for seconds: each system call of the loop waited for a whole body."""
    threads = TokenizerThreads(4, 100)
    at_work: list[tuple[float, float, float]] = []

    def work() -> None:
        began_s, used_s = time.monotonic(), time.thread_time()
        while time.thread_time() - used_s < 0.02:
            pass
        assert threading.current_thread().name == "reader_0"
        at_work.append((began_s, time.monotonic(), time.thread_time() - used_s))

    await asyncio.gather(*(threads.read(work, LARGE) for _ in range(4)))
    for (_, ended_s, took_s), (began_s, _, _) in pairwise(at_work):
        assert began_s - ended_s >= took_s
    threads.close()


def test_tokens_that_only_the_configuration_knows(folder: Path) -> None:
    change(
        folder / "tokenizer_config.json",
        eos_token="<|over|>",
        added_tokens_decoder={"900": {"content": "<think>", "special": False}},
    )
    codec = load_codec(str(folder))
    assert codec.tokenizer.encode("<think>", add_special_tokens=False).tokens == ["<think>"]
    over = codec.tokenizer.token_to_id("<|over|>")
    assert over is not None and codec.tokenizer.decode([over], skip_special_tokens=True) == ""


def with_byte_fallback() -> Tokenizer:
    """As sentencepiece models come: a space is ▁, an unknown character its bytes."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "b": 258, "▁a": 259}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    return with_byte_fallback()


def joined(tokenizer: Tokenizer, text: str) -> str:
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return b"".join(vocabulary.bytes_of(token) for token in ids).decode()


@settings(max_examples=50)
@given(text=st.text(max_size=20))
def test_byte_level(codec: Codec, text: str) -> None:
    assert joined(codec.tokenizer, text + ANSWER) == text + ANSWER


@settings(max_examples=50)
@given(text=st.text(st.sampled_from("ab c日😀é\n"), max_size=20))
def test_byte_fallback(fallback: Tokenizer, text: str) -> None:
    assert joined(fallback, text) == text


def test_parts_of_characters_are_written_as_bytes(codec: Codec, fallback: Tokenizer) -> None:
    vocabulary = Vocabulary(fallback)
    assert (vocabulary.text(0xE6), vocabulary.bytes_of(0xE6)) == ("\\xe6", b"\xe6")
    assert vocabulary.text(259) == " a"
    part = codec.tokenizer.encode("日", add_special_tokens=False).ids[0]
    assert Vocabulary(codec.tokenizer).text(part) == "\\xe6\\x97"


def test_special_tokens_are_themselves_and_unknown_ids_nothing(codec: Codec) -> None:
    vocabulary = Vocabulary(codec.tokenizer)
    assert vocabulary.text(2) == "<|end|>"
    assert (vocabulary.text(10_000_000), vocabulary.bytes_of(10_000_000)) == ("", b"")


def test_other_decoders_show_what_they_decode() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"hel": 0, "##lo": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert Vocabulary(tokenizer).text(0) == "hel"
    plain = Tokenizer(models.WordLevel(vocab={"hi": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert Vocabulary(plain).bytes_of(0) == b"hi"


MESSAGES = [
    {"role": "system", "content": "Be brief. <|end|>"},
    {"role": "user", "content": " hä?\n\n{{ 1 }} "},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
]
THEIRS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
VARIABLES: dict[str, str] = THEIRS
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n"
    "  {% endif %}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{% endfor %}{{ tools }}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_it_renders_as_transformers_does(source: str) -> None:
    rendered: Any = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, **THEIRS
    )
    assert ChatTemplate(source, VARIABLES).render(MESSAGES) == rendered[0][0]


@pytest.mark.parametrize("source", [TEMPLATES[4], "{{ messages[-1].content | trim }}."])
@pytest.mark.parametrize("content", ["", "yes", " yes, \n"])
def test_it_continues_the_last_message_as_transformers_does(source: str, content: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    rendered: Any = render_jinja_template(
        conversations=[messages], chat_template=source, continue_final_message=True, **THEIRS
    )
    assert ChatTemplate(source, VARIABLES).render(messages, continues_last=True) == rendered[0][0]


def test_a_last_message_that_is_not_written_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="continued"):
        ChatTemplate(TEMPLATES[0], VARIABLES).render(MESSAGES[:1], continues_last=True)


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('only one system message') }}", "{{ messages[9].content.x }}", "{{ 1 + 'a' }}"],
)
def test_a_template_that_refuses_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.param == "messages"


def test_a_template_is_kept_in_its_box() -> None:
    for source in ("messages.append(1)", "''.__class__.__mro__", "namespace.__init__.__globals__"):
        with pytest.raises(InvalidRequest):
            json.dumps(ChatTemplate(f"{{{{ {source} }}}}", {}).render(MESSAGES))
