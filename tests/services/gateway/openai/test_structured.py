"""Forms of answers: OpenAI's and vLLM's fields become one grammar, or a 400 that names what is wrong."""

from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import UnsupportedFeature
from services.gateway.forms.checks import GrammarChecks
from services.gateway.openai.admission import Acceptance
from services.gateway.openai.structured import closed, grammar_of
from services.gateway.text.tokenizer import Codec
from shared.errors import InvalidRequest
from tests.services.gateway.openai.test_admission import CHAT, context, make

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def of_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


OTHERS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"guided_json": SCHEMA},
    {"guided_json": orjson.dumps(SCHEMA).decode()},
    {"guided_regex": "[ab]+/c"},
    {"guided_choice": ["yes", 'say "no"', "ü\n"]},
    {"guided_grammar": 'root ::= "a" | root "b"'},
    {"guided_grammar": 'start: "a"'},
    {"structured_outputs": {"json": SCHEMA, "regex": None}},
    {"structured_outputs": {"choice": ["a"]}},
    {"structured_outputs": {"json_object": True}},
    of_schema(name="x", strict=True, schema=SCHEMA),
    of_schema(name="x"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": "json"}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    (of_schema(schema=[1]), "response_format.json_schema.schema"),
    (of_schema(schema={"not": {}}), "response_format.json_schema.schema"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
]


@pytest.mark.parametrize("fields", OTHERS)
async def test_forms_become_a_grammar(codec: Codec, fields: dict[str, Any]) -> None:
    accept = make(codec)
    job = await accept.chat(orjson.dumps({**CHAT, **fields}), context)
    assert job.samplings[0].grammar
    accept.close()


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
async def test_no_form_is_no_grammar(codec: Codec, fields: dict[str, Any]) -> None:
    accept = make(codec)
    assert (await accept.chat(orjson.dumps({**CHAT, **fields}), context)).samplings[0].grammar == ""
    accept.close()


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_what_is_wrong_is_named(codec: Codec, fields: dict[str, Any], param: str) -> None:
    accept: Acceptance = make(codec)
    with pytest.raises(InvalidRequest) as caught:
        await accept.chat(orjson.dumps({**CHAT, **fields}), context)
    assert caught.value.param == param
    accept.close()


LEAVES = [{"type": "integer"}, {"type": "string"}, {"type": "number", "minimum": 3}, {"enum": [1, "a"]}]
PARTS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(lambda part: {"type": "array", "items": part}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(
            lambda properties: {"type": "object", "properties": properties, "required": list(properties)[:1]}
        ),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.sampled_from([1, "a", 3.5, 2**60]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=5,
)


@given(PARTS, VALUES)
def test_what_a_closed_schema_describes_the_schema_does(schema: dict[str, Any], value: Any) -> None:
    if jsonschema.Draft202012Validator(dict(closed(schema))).is_valid(value):
        jsonschema.Draft202012Validator(schema).validate(value)


def test_closing_leaves_what_may_count_on_more() -> None:
    parts = {"allOf": [{"type": "object", "properties": {name: {}}} for name in "ab"]}
    assert closed(parts) == parts
    assert closed(SCHEMA) == {**SCHEMA, "additionalProperties": False}
    assert closed({**SCHEMA, "additionalProperties": True})["additionalProperties"] is True


def test_a_schema_of_a_thousand_levels_is_refused() -> None:
    """Keeps the interpreter's limit of nested calls from being a server error."""
    schema: dict[str, Any] = {}
    for _ in range(1000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        grammar_of({"guided_json": schema})


async def test_a_model_without_grammars_refuses_forms() -> None:
    with pytest.raises(UnsupportedFeature):
        await GrammarChecks(None).check("x", "guided_regex")
