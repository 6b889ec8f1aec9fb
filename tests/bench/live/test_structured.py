"""The bench of structured output: what it draws is a schema, what it finds wrong is wrong."""

import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.kit.load import Answer
from bench.live.structured import REFUSED, fault_of, random_schema
from bench.live.structured_suite import derived, digest_of, suite_schemas
from shared.errors import InternalError
from shared.grammars import Grammars, json_grammar
from shared.tokenizer_files import load_tokenizer


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer("models/tiny_chat"))


def test_what_is_drawn_can_be_answered(grammars: Grammars) -> None:
    draw = random.Random(7)
    for _ in range(100):
        schema = random_schema(draw, depth=2)
        jsonschema.Draft202012Validator.check_schema(schema)
        grammars.check(json_grammar(schema))


def test_faults() -> None:
    schema = {"type": "integer"}
    assert fault_of(Answer(0.0, pieces=["12"]), schema) == ""
    assert fault_of(Answer(0.0, pieces=["1", "x"], finish_reason="length"), schema).startswith("length")
    assert fault_of(Answer(0.0, pieces=['"a"']), schema)
    assert fault_of(Answer(0.0, pieces=["2.0"]), schema) == ""
    assert fault_of(Answer(0.0, pieces=["9.7305"]), {"multipleOf": 0.0001}) == ""
    assert fault_of(Answer(0.0, pieces=["9.73055"]), {"multipleOf": 0.0001})
    assert fault_of(Answer(0.0, error="status 400: no"), schema) == REFUSED
    assert fault_of(Answer(0.0, error="connection lost"), schema) == "connection lost"


GROUPS: list[dict[str, Any]] = [
    {"schema": {"$schema": "x", "type": "integer", "minimum": 3}, "tests": []},
    {"schema": {"enum": ["a", "b"]}, "tests": []},
    {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, "tests": []},
    {"schema": {"pattern": "\\p{Letter}"}, "tests": []},
    {"schema": False, "tests": []},
]


def test_schemas_of_the_suite_are_found_in_its_archive_and_in_its_folder(tmp_path: Path) -> None:
    text = json.dumps(GROUPS).encode()
    (tmp_path / "draft2020-12").mkdir()
    (tmp_path / "draft2020-12" / "a.json").write_bytes(text)
    with tarfile.open(tmp_path / "it.tar.gz", "w:gz") as archive:
        for name in ("p/json/tests/draft2020-12/a.json", "p/json/tests/draft7/b.json", "p/json/a.json"):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    sources = [tmp_path / "draft2020-12", tmp_path / "it.tar.gz"]
    found = [suite_schemas(source) for source in sources]
    assert found[0] == found[1] == [group["schema"] for group in GROUPS[:3]]
    assert len({digest_of(source) for source in sources}) == 2
    with pytest.raises(InternalError):
        suite_schemas(tmp_path)


def test_what_is_made_of_them_is_different_each_time_and_can_be_answered(grammars: Grammars) -> None:
    parts = [group["schema"] for group in GROUPS[:3] if isinstance(group["schema"], dict)]
    made = derived(parts, 150, random.Random(2))
    assert len({json.dumps(schema, sort_keys=True) for schema in made}) == 150
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)
        grammars.check(json_grammar(schema))
        assert "#/$defs/a" not in json.dumps(schema)
    with pytest.raises(InternalError):
        derived(parts[2:], 1, random.Random(2))
