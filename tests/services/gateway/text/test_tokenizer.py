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
from transformers import AutoTokenizer

from services.gateway.text.tokenizer import (
    AT_ONCE_BYTES,
    MAX_WAITING_BYTES,
    Codec,
    TokenizerThreads,
    load_codec,
)
from shared.errors import ConfigError, Overloaded
from tests.services.gateway.conftest import TEMPLATE, encode_chat

CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": " be nice "}, {"role": "user", "content": "häß 日本語 😀\n\n<|end|>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ],
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
    assert over is not None
    assert codec.tokenizer.decode([over], skip_special_tokens=True) == ""
