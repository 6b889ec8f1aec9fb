"""What comes from outside is judged before it is used: models' files, classes in files or packages, grammars.

Keeps from coming back: a library's tracebacks about a truncated file, and mistyped folders that are looked
for on the hub for a minute.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.errors import ConfigError, InvalidRequest
from shared.grammars import (
    MOST_GRAMMAR_CHARS,
    GrammarMatcher,
    Grammars,
    json_grammar,
    lark_grammar,
    regex_grammar,
    words_of,
)
from shared.model_files import HubId, check_model, name_of, revision_advice, source_of
from shared.plugins import PluginFaults, PluginKind, absolute, label
from shared.tokenizer_files import TokenizerFiles, load_tokenizer


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
    assert source_of("org/name") == HubId("org/name", None) and name_of("org/name@v1.2") == "name"
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


KIND = PluginKind("kvasir.tests", "greeter", "greeter", ("greet",))
SOURCE = """
class Polite:
    def greet(self):
        return "good day"

class Silent:
    pass
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "torn.py").write_text("class Polite(\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["mine.py:Polite", "./mine.py:Polite"])
def test_a_class_in_a_file_is_found_from_where_one_stands(name: str, sources: Path) -> None:
    assert KIND.find(name, {})().greet() == "good day"
    assert absolute(name) == f"{sources}/mine.py:Polite" and label(absolute(name)) == "mine.py:Polite"
    assert KIND.find(name, {}) is KIND.find(absolute(name), {}), "read once"
    (sources / "mine.py").write_text(SOURCE.replace("good day", "hello"))
    assert KIND.find(name, {})().greet() == "hello", "and again when it has changed"


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:Polite", r"there is no file \S+nowhere.py that can be read: No such file"),
        ("mine.py:Plite", "has no class 'Plite'; its classes are: Polite, Silent"),
        ("mine.py", "has no class ''; its classes are: Polite, Silent"),
        ("mine.py:Silent", "lacks what a greeter needs: greet"),
        ("broken.py:Polite", r"ModuleNotFoundError: No module named 'nothing_of_that_name' \(broken.py:1\)"),
        ("torn.py:Polite", r"SyntaxError: .*\(torn.py:1\)"),
        ("polte", r"'polte' is not known; did you mean 'polite'\? write one of: polite, or FILE.py:CLASS"),
    ],
)
def test_what_cannot_be_loaded_is_told(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        KIND.find(name, {"polite": lambda: None})
    assert error.value.param == "greeter"


def test_failures_count_for_a_minute() -> None:
    faults = PluginFaults()
    for at_s in (0.0, 30.0):
        faults.note("greeter Polite", "greet", ValueError("no"), at_s)
    assert faults.text(31.0) == "greeter Polite raised ValueError: no in greet; 2 times within a minute"
    assert faults.text(70.0).endswith("once within a minute") and faults.text(91.0) == ""


MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny_chat"


@pytest.fixture(scope="module")
def files() -> TokenizerFiles:
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def grammars(files: TokenizerFiles) -> Iterator[Grammars]:
    yield Grammars(files)


def following(grammars: Grammars, files: TokenizerFiles, matcher: GrammarMatcher) -> set[str]:
    words = np.zeros(words_of(grammars.vocabulary), dtype=np.uint32)
    matcher.mask(words)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return {str(files.tokenizer.id_to_token(int(token))) for token in ids}


def id_of(files: TokenizerFiles, text: str) -> int:
    token = files.tokenizer.token_to_id(text)
    assert token is not None
    return token


def test_what_may_follow(grammars: Grammars, files: TokenizerFiles) -> None:
    matcher = grammars.compile(regex_grammar("ab?"))
    assert following(grammars, files, matcher) == {"a", "ab"} and matcher.accept(id_of(files, "a"))
    again = matcher.copy()
    assert following(grammars, files, matcher) == {"b", "<|end|>"}
    was_terminated = matcher.is_terminated
    assert matcher.accept(id_of(files, "b")) and following(grammars, files, matcher) == {"<|end|>"}
    assert (was_terminated, matcher.is_terminated) == (False, True) and not matcher.accept(id_of(files, "a"))
    assert following(grammars, files, matcher) == set() and matcher.error
    assert following(grammars, files, again) == {"b", "<|end|>"}, "a copy goes its own way"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "not": {}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"if": {}, "then": {"type": "string"}}, "then"),
    ({"type": "string", "format": "kazoo"}, "kazoo"),
    ({"type": "strin"}, "strin"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ({"$ref": "http://127.0.0.1:1/elsewhere"}, "not present"),
    ({"type": "object", "not": {}, "x-guidance": {"lenient": True}}, "not"),
    ({"type": "object", "properties": {f"p{at}": {} for at in range(5000)}}, "items"),
    ({"type": "integer", "multipleOf": 9973, "maximum": 2**53}, "too many"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_schemas_that_are_refused(grammars: Grammars, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        grammars.check(json_grammar(schema))


@pytest.mark.parametrize("grammar", [regex_grammar("(a"), lark_grammar("start: b"), "x" * 10])
def test_grammars_that_are_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(InvalidRequest):
        grammars.check(grammar)


def test_what_takes_too_long_to_follow_is_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest):
        grammars.check(regex_grammar("(a{1000}){1000}"))
    with pytest.raises(InvalidRequest, match=str(MOST_GRAMMAR_CHARS)):
        grammars.check(lark_grammar('start: "' + "a" * MOST_GRAMMAR_CHARS + '"'))


def test_json_stays_on_one_line(grammars: Grammars, files: TokenizerFiles) -> None:
    grammar = json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for text, is_taken in (('{"a": 1}', True), ('{"a":1}', True), ('{"a" : 1}', False), ('{\n"a":1}', False)):
        matcher = grammars.compile(grammar)
        tokens = files.tokenizer.encode(text, add_special_tokens=False).ids
        assert all(matcher.accept(token) for token in tokens) is is_taken, text
        assert json.loads(text) == {"a": 1}


def test_a_model_without_an_end_token_has_none(files: TokenizerFiles) -> None:
    without = TokenizerFiles(files.folder, files.tokenizer, {}, {}, (), files.vocab_size)
    with pytest.raises(ConfigError, match="end token"):
        Grammars(without)
