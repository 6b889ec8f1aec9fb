"""Forms and functions in a request become a grammar or messages, or a 400 that names what is wrong."""

import json
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import UnsupportedFeature
from services.gateway.forms.checks import GrammarChecks
from services.gateway.openai.admission import Acceptance
from services.gateway.openai.fields import Ignored
from services.gateway.openai.structured import closed, grammar_of
from services.gateway.openai.tools import Tools, tools_of, with_short_ids
from services.gateway.text.tokenizer import ChatTemplate, Codec
from shared.errors import InvalidRequest
from tests.services.gateway.conftest import encode_chat
from tests.services.gateway.openai.test_bodies import CHAT, context, make

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
    assert closed(parts) == parts and closed(SCHEMA) == {**SCHEMA, "additionalProperties": False}
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


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NEGATED = {"function": {"name": "a", "parameters": {"not": {}, "properties": {"b": {}}}}}
_WEATHER = {"name": "weather", "description": "of a city", "parameters": CITY}
WEATHER = {"type": "function", "function": _WEATHER}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
CALL = {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_abc", "content": "sunny"},
]


def test_what_may_be_called() -> None:
    tools = tools_of([WEATHER, NOW], None, None, Ignored())
    assert (tools.mode, tools.is_parallel) == ("auto", True)
    assert [function.name for function in tools.functions] == ["weather", "now"]
    assert tools.functions[0].parameters["additionalProperties"] is False
    assert tools.functions[1].parameters == {"type": "object", "additionalProperties": False}
    named = tools_of([WEATHER, NOW], {"type": "function", "function": {"name": "now"}}, None, Ignored())
    assert (named.mode, named.is_parallel) == ("required", False)
    assert (len(named.functions), len(named.described)) == (1, 2)
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}
    assert [each.name for each in tools_of([WEATHER, NOW], some, False, Ignored()).functions] == ["now"]
    for choice in (None, "auto", "none"):
        assert tools_of([], choice, None, Ignored()) == Tools()
    assert tools_of([WEATHER], "none", None, Ignored()) == Tools()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}, "tool_choice": "required"}, "tool_choice"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "custom"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [NOW], "tool_choice": "now"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (
            {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"tools": [NEGATED], "tool_choice": "required"}, "tools[0]"),
    ],
)
async def test_what_is_wrong_with_tools_is_named(codec: Codec, fields: dict[str, Any], param: str) -> None:
    accept = make(codec)
    with pytest.raises(InvalidRequest) as caught:
        await accept.chat(orjson.dumps({**CHAT, **fields}), context)
    assert caught.value.param == param
    accept.close()


async def test_calls_that_must_be_are_held_to_a_grammar(codec: Codec) -> None:
    accept = make(codec, default_max_tokens=20)
    held = await accept.chat(
        orjson.dumps({**CHAT, "tools": [NOW], "tool_choice": "required", "max_tokens": 9}), huge
    )
    assert held.samplings[0].grammar and held.reader is not None
    free = await accept.chat(orjson.dumps({**CHAT, "tools": [NOW], "max_tokens": 9}), huge)
    assert not free.samplings[0].grammar and free.reader is not None
    none = await accept.chat(orjson.dumps({**CHAT, "tools": [NOW], "tool_choice": "none"}), huge)
    assert none.reader is None and none.prompts == (tuple(encode_chat(codec, CHAT["messages"])),)
    accept.close()


async def huge() -> int:
    return 100_000


async def test_history_becomes_text_for_it(codec: Codec) -> None:
    accept = make(codec)
    system = {"role": "system", "content": "Be brief."}
    body = {**CHAT, "messages": [system, *HISTORY], "tools": [WEATHER, NOW]}
    job = await accept.chat(orjson.dumps(body), huge)
    text = codec.tokenizer.decode(list(job.prompts[0]), skip_special_tokens=False)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}' in text
    assert "<|system|>Be brief.\n\nYou may call" in text and text.count('"weather"') == 2
    assert "<|user|><tool_response>\nsunny" in text
    accept.close()


async def test_a_template_that_knows_functions_gets_them(codec: Codec) -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    knowing = Codec(codec.tokenizer, ChatTemplate(source, {}), (2,), codec.vocab_size, codec.forms_folder)
    accept = make(knowing)
    job = await accept.chat(orjson.dumps({**CHAT, "messages": HISTORY, "tools": [NOW]}), huge)
    text = codec.tokenizer.decode(list(job.prompts[0]))
    decoder = json.JSONDecoder()
    tools, end = decoder.raw_decode(text)
    assert tools[0]["function"]["name"] == "now" and "strict" not in tools[0]["function"]
    user, end = decoder.raw_decode(text, end)
    called, end = decoder.raw_decode(text, end)
    result, _ = decoder.raw_decode(text, end)
    assert called["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert (user["role"], result["role"], result["tool_call_id"]) == ("user", "tool", "call_abc")
    accept.close()


STRICT_TEMPLATES = {
    "one system message, first": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
    "alternating roles": (
        "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("source", STRICT_TEMPLATES.values(), ids=STRICT_TEMPLATES)
def test_system_messages_anywhere_for_a_template_that_wants_them_first(source: str) -> None:
    """As Codex (two developer messages, two of the user) and Claude Code (one after the user's) send them."""
    roles = ["system", "system", "user", "user", "system", "assistant", "system", "user"]
    messages = [{"role": role, "content": str(at)} for at, role in enumerate(roles)]
    said = ChatTemplate(source, {}).render(messages)
    assert said == "<system>0\n\n1<user>2\n\n3\n\n4<assistant>5<user>6\n\n7"
    with pytest.raises(InvalidRequest, match="no such chat"):
        ChatTemplate("{{ raise_exception('no such chat') }}", {}).render(messages)


async def test_thoughts_are_read_apart(codec: Codec) -> None:
    begins = "{% if enable_thinking is not false %}<think>{% endif %}"
    source = "{% for m in messages %}{{m.content}}{% endfor %}" + begins
    template = ChatTemplate(source + "{# </think> #}", {})
    thinking = Codec(codec.tokenizer, template, (2,), 400, codec.forms_folder)
    accept = make(thinking)
    job = await accept.chat(orjson.dumps(CHAT), context)
    assert job.reader is not None
    reader = job.reader()
    assert [type(part).__name__ for part in reader.feed("a</think>b")] == ["Reasoning", "Content"]
    held = await accept.chat(orjson.dumps({**CHAT, "response_format": {"type": "json_object"}}), context)
    assert held.reader is None, "an answer in a form has no room for thoughts"
    assert "<think>" not in codec.tokenizer.decode(list(held.prompts[0]))
    accept.close()


def test_short_ids_agree() -> None:
    call = {"id": "call_abcdef", "type": "function", "function": {}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_abcdef"},
    ]
    called, result = with_short_ids(messages)
    assert called["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9 and result["tool_call_id"].isalnum()
