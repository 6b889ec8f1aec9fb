"""`llm`: its library and its command line hold a chat; our errors reach the user as sentences."""

import json
import os
import subprocess
import sys
from pathlib import Path

import llm
import openai
import pytest
import yaml

from tests.clients.chats import FIRST, MAX_TOKENS, OVERLONG, SECOND, UNKNOWN_MODEL, WRONG_KEY
from tests.clients.serving import ROOT, Serving


@pytest.fixture
def user_path(stack: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder that names our endpoint as extra OpenAI models."""
    endpoint = {"api_base": stack.base_url, "api_key_name": "kvasir", "supports_schema": True}
    models = [
        {"model_id": "ours", "model_name": stack.model, **endpoint},
        {"model_id": "theirs", "model_name": UNKNOWN_MODEL, **endpoint},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


def command(*words: str) -> "subprocess.Popen[bytes]":
    """`llm WORDS`, running."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.clients.loopback", "llm", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*words: str) -> tuple[int, str, str]:
    """`llm WORDS` to its end: exit code, output, errors."""
    with command(*words) as process:
        output, errors = process.communicate(timeout=60)
    return process.returncode, output.decode(), errors.decode()


def parts_of(*words: str) -> list[bytes]:
    """What `llm WORDS` prints, in the pieces in which it comes."""
    parts = []
    with command(*words) as process:
        assert process.stdout is not None and process.stderr is not None
        while part := os.read(process.stdout.fileno(), 65_536):
            parts.append(part)
        errors = process.stderr.read().decode()
    assert process.returncode == 0, errors
    return parts


def test_the_library_streams_two_turns(stack: Serving, user_path: Path) -> None:
    conversation = llm.get_model("ours").conversation()
    for text in (FIRST, SECOND):
        response = conversation.prompt(text, key=stack.key, max_tokens=MAX_TOKENS, temperature=0)
        parts = [part for part in response if part]
        assert len(parts) > 1 and "".join(parts).strip() and response.usage().output > 1
    assert len(conversation.responses) == 2


def test_the_command_line_streams_two_turns(stack: Serving, user_path: Path) -> None:
    for words in (("-m", "ours", FIRST), ("--continue", SECOND)):
        options = ("-o", "max_tokens", str(MAX_TOKENS), "-o", "temperature", "0", "--key", stack.key)
        parts = parts_of(*words, *options)
        assert len(parts) > 1 and b"".join(parts).strip()
    code, output, errors = run("logs", "--json", "-n", "0")
    assert code == 0, errors
    turns = json.loads(output)
    assert [turn["prompt"] for turn in turns] == [FIRST, SECOND]
    assert len({turn["conversation_id"] for turn in turns}) == 1
    assert all(turn["response"].strip() for turn in turns)


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_the_command_line_with_a_schema(stack: Serving, user_path: Path, flags: tuple[str, ...]) -> None:
    """In `llm`'s short form; what it prints is the JSON."""
    options = ("--schema", "name, age int, moods: one or two words", *flags, "--key", stack.key)
    code, output, errors = run("-m", "ours", "Invent a dog.", *options)
    assert code == 0, errors
    dog = json.loads(output)
    assert set(dog) == {"name", "age", "moods"} and type(dog["age"]) is int
    assert type(dog["name"]) is str and type(dog["moods"]) is str


def test_the_command_line_with_a_schema_for_several(stack: Serving, user_path: Path) -> None:
    """Logged, and found again by its schema."""
    options = ("--schema-multi", "name, age int", "-o", "max_tokens", "200", "--key", stack.key)
    code, output, errors = run("-m", "ours", "Invent two dogs.", *options)
    assert code == 0, errors
    dogs = json.loads(output)["items"]
    assert all(set(dog) == {"name", "age"} for dog in dogs)
    code, output, errors = run("logs", "--schema-multi", "name, age int", "--data")
    assert code == 0, errors
    assert json.loads(output)["items"] == dogs


@pytest.mark.parametrize(
    ("model", "prompt", "error"),
    [("theirs", FIRST, openai.NotFoundError), ("ours", OVERLONG, openai.BadRequestError)],
)
def test_errors_of_the_library(
    stack: Serving, user_path: Path, model: str, prompt: str, error: type[openai.APIStatusError]
) -> None:
    with pytest.raises(error):
        llm.get_model(model).prompt(prompt, key=stack.key).text()


def test_a_wrong_key(stack: Serving, user_path: Path) -> None:
    with pytest.raises(openai.AuthenticationError):
        llm.get_model("ours").prompt(FIRST, key=WRONG_KEY).text()


@pytest.mark.parametrize(
    ("model", "prompt", "key", "says"),
    [
        ("theirs", FIRST, None, UNKNOWN_MODEL),
        ("ours", OVERLONG, None, "maximum context length"),
        ("ours", FIRST, WRONG_KEY, "401"),
    ],
)
def test_errors_of_the_command_line(
    stack: Serving, user_path: Path, model: str, prompt: str, key: str | None, says: str
) -> None:
    code, output, errors = run("-m", model, prompt, "--key", key or stack.key)
    assert (code, output.strip()) == (1, "") and errors.startswith("Error:") and says in errors
