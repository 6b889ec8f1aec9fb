"""From body to job: what is taken, tokens, limits and sampling, and which field an error names."""

import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from services.gateway.config import GatewayConfig
from services.gateway.errors import UnsupportedFeature
from services.gateway.http.reading import Models
from services.gateway.openai import schemas
from services.gateway.openai.admission import Acceptance, sampling_of
from services.gateway.openai.fields import ELSEWHERE, IGNORED, MOST_IGNORED, REFUSED, refuse_unsupported
from services.gateway.openai.schemas import ChatRequest, TextRequest, parse
from services.gateway.text.tokenizer import Codec
from shared.errors import ConfigError, ContextOverflow, InvalidRequest, UnknownModel
from shared.messages.sequence import Sampling
from tests.services.gateway.conftest import encode_chat

CONTEXT = 100
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def context() -> int:
    return CONTEXT


def make(codec: Codec, **settings: Any) -> Acceptance:
    return Acceptance(GatewayConfig.model_validate({"served_name": "m", **settings}), codec)


@pytest_asyncio.fixture
async def acceptance(codec: Codec) -> AsyncIterator[Acceptance]:
    accept = make(codec)
    yield accept
    accept.close()


async def test_a_chat_becomes_one_prompt(acceptance: Acceptance, codec: Codec) -> None:
    asked = {**CHAT, "n": 2, "stop": "END", "temperature": 0.5, "top_k": 5}
    job = await acceptance.chat(orjson.dumps(asked), context)
    assert job.prompts == (tuple(encode_chat(codec, CHAT["messages"])),)
    (sampling,) = job.samplings
    assert sampling.max_tokens == CONTEXT - len(job.prompts[0]), "what is left of the context"
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 1.0, 5)
    assert sampling.end_token_ids == (2,)
    assert (job.n, job.rules.stops, job.stream, job.include_usage) == (2, ("END",), False, False)


async def test_limits_in_order_of_precedence(acceptance: Acceptance, codec: Codec) -> None:
    both = await acceptance.chat(orjson.dumps({**CHAT, "max_tokens": 5, "max_completion_tokens": 6}), context)
    assert both.samplings[0].max_tokens == 6
    capped = make(codec, default_max_tokens=7)
    assert (await capped.chat(orjson.dumps(CHAT), context)).samplings[0].max_tokens == 7
    capped.close()
    for fields, left in (({}, 3), ({"max_tokens": 3}, 3)):
        body = {"model": "m", "prompt": [5] * (CONTEXT - 3), **fields}
        assert (await acceptance.text(orjson.dumps(body), context)).samplings[0].max_tokens == left


@pytest.mark.parametrize(("prompt", "limit"), [(100, None), (150, None), (91, 10)])
async def test_overflow(acceptance: Acceptance, prompt: int, limit: int | None) -> None:
    body = {"model": "m", "prompt": [5] * prompt, "max_tokens": limit}
    with pytest.raises(ContextOverflow) as caught:
        await acceptance.text(orjson.dumps(body), context)
    begin, rest = caught.value.message.split(" However, you requested ")
    assert begin == f"This model's maximum context length is {CONTEXT} tokens."
    answer = limit or 1
    assert f"{prompt + answer} tokens ({prompt} in the prompt, {answer} in the completion)" in rest
    assert caught.value.param == "prompt"


async def test_extremes_a_sampler_could_trip_over(acceptance: Acceptance) -> None:
    body = {**CHAT, "temperature": 1e-9, "top_p": 0, "top_k": -1, "ignore_eos": True, "seed": -(2**63)}
    (sampling,) = (await acceptance.chat(orjson.dumps(body), context)).samplings
    assert sampling.temperature == 0 and 0 < sampling.top_p < 1e-3 and sampling.top_k == 0
    assert sampling.end_token_ids == () and 0 <= sampling.seed < 2**63


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "n": 17}, "n"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x", "functions": [{}]}, "functions"),
    ],
)
async def test_refusals(acceptance: Acceptance, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await acceptance.text(orjson.dumps({"model": "m", **body}), context)
    assert caught.value.param == param


async def test_unknown_fields_are_noted_or_refused(acceptance: Acceptance, codec: Codec) -> None:
    job = await acceptance.chat(orjson.dumps({**CHAT, "frobnicate": 1, "x" * 99: 1, "user": "u"}), context)
    assert job.ignored == ("frobnicate", "x" * 64, "user")
    many = await acceptance.chat(orjson.dumps({**CHAT, **{f"field_{at}": 1 for at in range(500)}}), context)
    assert len(many.ignored) == MOST_IGNORED
    strict = make(codec, unknown_fields="refuse")
    with pytest.raises(InvalidRequest, match="is temperature meant") as caught:
        await strict.chat(orjson.dumps({**CHAT, "tempature": 1, "user": "u"}), context)
    assert caught.value.param == "tempature"
    with pytest.raises(InvalidRequest, match="leave it out"):
        await strict.chat(orjson.dumps({**CHAT, "zzz": 1}), context)
    strict.close()


LITTLE_TEXT: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"model": "m", "messages": [{"role": "user", "content": ""}] * 200}),
    ("chat", {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 200}]}),
    ("text", {"model": "m", "prompt": "x", **{f"unknown_{number}": 0 for number in range(500)}}),
]


@pytest.mark.parametrize(("kind", "fields"), LITTLE_TEXT)
async def test_whatever_costs_time_is_off_the_event_loop(
    acceptance: Acceptance, monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any]
) -> None:
    """Only text used to be counted: a chat of empty messages was rendered where all streams are written."""
    threads: list[str] = []

    def note(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            threads.append(threading.current_thread().name)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, noting)

    note(schemas, "parse")
    note(Codec, "encode_text")
    with contextlib.suppress(ContextOverflow):
        await getattr(acceptance, kind)(orjson.dumps(fields), context)
    assert [name.rstrip("01_") for name in threads] == ["reader", "tokenizer"]


MESSAGES = [{"role": "user", "content": "hi"}]


def sampled(codec: Codec, **fields: Any) -> Sampling:
    request = parse(ChatRequest, {"model": "m", "messages": MESSAGES, **fields})
    return sampling_of(request, codec, 7, 20)


def test_what_is_not_asked_for_does_nothing(codec: Codec) -> None:
    assert sampled(codec) == Sampling(seed=7, max_tokens=20, end_token_ids=(2,))
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0}
    nothing = {"min_tokens": 0, "stop_token_ids": [], "logprobs": False, "top_logprobs": 0}
    assert sampled(codec, **neutral, **nothing) == sampled(codec)
    assert sampled(codec, **dict.fromkeys((*neutral, *nothing))) == sampled(codec)


def test_logprobs_of_both(codec: Codec) -> None:
    asked: dict[str, Any] = {"logprobs": True}
    cases = ({"logprobs": False}, asked, {**asked, "top_logprobs": 20})
    found = [sampled(codec, **fields).top_logprobs for fields in cases]
    assert found == [None, 0, 20]
    for wanted in (None, 0, 5):
        request = parse(TextRequest, {"model": "m", "prompt": "x", "logprobs": wanted})
        assert sampling_of(request, codec, 7, 20).top_logprobs == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"min_tokens": 21}, "min_tokens"), ({"stop_token_ids": [5, 99999]}, "stop_token_ids")],
)
def test_what_cannot_be_is_refused_by_name(codec: Codec, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampled(codec, **fields)
    assert caught.value.param == param


def test_everything_is_carried(codec: Codec) -> None:
    penalties = {"presence_penalty": -1.5, "frequency_penalty": 2, "repetition_penalty": 1.2}
    sampling = sampled(codec, **penalties, min_p=0.1, min_tokens=20, logprobs=True, top_logprobs=20)
    assert {name: getattr(sampling, name) for name in penalties} == penalties
    assert (sampling.min_p, sampling.min_tokens, sampling.top_logprobs) == (0.1, 20, 20)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({"stop_token_ids": [9, 2, 9]}, (2, 9)), ({"stop_token_ids": [9], "ignore_eos": True}, (9,))],
)
def test_stop_tokens_join_the_ends(codec: Codec, fields: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert sampled(codec, **fields).end_token_ids == ends


TINY_CHAT = "models/tiny_chat"


def config(**fields: Any) -> GatewayConfig:
    return GatewayConfig.model_validate({"served_name": "a", "model": TINY_CHAT, **fields})


@pytest.fixture
def models(codec: Codec) -> Models:
    whole = config(models={"b": TINY_CHAT}, aliases={"gpt": "b"})
    whole.check()
    return Models([Acceptance(each, codec) for each in whole.of_models()])


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "a", "x": [1, {"model": "b"}]}', "a"),
        (b'{"x": {"model": "a"}, "model": "b"}', "b"),
        (b'{"model": "gpt"}', "b"),
        (b'{"messages": []}', "a"),
        (b'{"model": 3}', "a"),
        (b'{"model": "b"', "a"),
        (b"\xff", "a"),
        (b"", "a"),
    ],
)
def test_a_request_is_read_by_the_model_it_names_or_the_first(models: Models, body: bytes, name: str) -> None:
    assert models.of(body).name == name


def test_others_are_refused_with_all_that_there_are(models: Models) -> None:
    assert models.names == ("a", "b", "gpt")
    with pytest.raises(UnknownModel, match="there is 'a', 'b', 'gpt'") as caught:
        models.of(b'{"model": "c"}')
    assert caught.value.param == "model"


def test_adapters_are_models_of_their_own_that_workers_tell(models: Models, codec: Codec) -> None:
    """As long as no worker is heard of, the scheduler decides."""
    models.adapters = {"a": ("x",), "b": None}.get
    assert models.names == ("a", "b", "gpt", "a:x")
    found = models.of(b'{"model": "a:x"}')
    assert (found.name, found.adapter, found.config.served_name) == ("a:x", "x", "a")
    assert models.find("gpt:any").names == ("b:any", "gpt:any")
    for name in ("a:y", "a:", "c:x", "x"):
        with pytest.raises(UnknownModel, match="there is 'a', 'b', 'gpt', 'a:x'"):
            models.find(name)
    alone = Models([Acceptance(config(), codec)])
    assert alone.of(b'{"model": "a:x"}') is alone.first
    alone.adapters = {"a": ("x",)}.get
    assert alone.of(b'{"model": "a:x"}').adapter == "x"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"models": {"a": TINY_CHAT}}, "models"),
        ({"models": {"b": "/no/such/folder"}}, "model"),
        ({"aliases": {"x": "none"}}, "aliases"),
        ({"aliases": {"a": "a"}}, "aliases"),
        ({"models": {"b": TINY_CHAT}, "aliases": {"b": "a"}}, "aliases"),
    ],
)
def test_names_that_cannot_be_are_said_before_the_start(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**fields).check()
    assert caught.value.param == param


def chat(**fields: Any) -> schemas.ChatRequest:
    return schemas.parse(schemas.ChatRequest, {"model": "m", "messages": MESSAGES, **fields})


def text(**fields: Any) -> schemas.TextRequest:
    return schemas.parse(schemas.TextRequest, {"model": "m", "prompt": "p", **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert text(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, 5, {}, [], [[]], [1, "a"], [[1], "a"], [True], [1.5], [["a"]]])
def test_prompts_of_no_form(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        text(prompt=prompt)
    assert caught.value.param == "prompt" and "Value error" not in caught.value.message


OUT_OF_RANGE: dict[str, list[Any]] = {
    "model": [None, 5],
    "n": [0, 129, 1.5],
    "temperature": [-0.1, 2.1, "1"],
    "top_p": [1.1],
    "top_k": [-2],
    "max_tokens": [-1],
    "max_completion_tokens": [-1],
    "seed": [2**63, "x"],
    "stop": [["a"] * (schemas.MAX_STOPS + 1), {}],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0, 101],
    "min_p": [-0.1, 1.1],
    "min_tokens": [-1],
    "stop_token_ids": [5, [5] * 129],
    "logprobs": [1],
    "top_logprobs": [1],
    "messages": [[], "hi"],
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: value}, name) for name, values in OUT_OF_RANGE.items() for value in values),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [*MESSAGES, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
    ],
)
def test_an_error_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(param) or param == "stream_options"


def test_messages_for_a_template() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": text} for text in "ab"]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "", "unknown": 1},
    ]
    assert schemas.template_messages(chat(messages=messages).messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x", "name": "1"}, "messages[0].role"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{}]}, "messages[0].content[0].type"),
    ],
)
def test_messages_of_unsupported_kinds(message: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        schemas.template_messages(chat(messages=[message]).messages)
    assert caught.value.param == param
    assert "image_url" not in str(message) or "parts of type 'image_url' are not supported" in str(
        caught.value
    )


def test_millions_of_wrong_items_cost_one_error() -> None:
    many = [1] * 300_000
    for fields in ({"messages": many}, {"messages": [{"role": "user", "content": many}]}, {"stop": many}):
        with pytest.raises(InvalidRequest):
            chat(**fields)
    assert len(text(prompt=many).prompts[0]) == len(many)


ASKED: dict[str, Any] = {
    "functions": [{}],
    "function_call": {"name": "f"},
    "top_logprobs": 3,
    "best_of": 2,
    "grammar": "root ::= x",
    "logits_processors": ["x"],
    "chat_template": "x",
    "documents": [{}],
    "dimensions": 16,
    "tools": [{}],
    "return_tokens_as_token_ids": True,
    "length_penalty": 0.8,
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "suffix": "x",
    "echo": True,
    "use_beam_search": True,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "guided_whitespace_pattern": " ",
}
NOTHING: dict[str, list[Any]] = {
    "top_logprobs": [0],
    "modalities": [["text"]],
    "suffix": [""],
    "echo": [False],
    "add_generation_prompt": [True],
}


def test_every_feature_has_a_case() -> None:
    assert set(ASKED) == set(REFUSED) - ELSEWHERE and not set(REFUSED) & IGNORED and set(REFUSED) > ELSEWHERE


@pytest.mark.parametrize("name", sorted(ASKED))
def test_asking_for_it_is_refused_by_name_and_asking_for_nothing_is_fine(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=REFUSED[name][1] or "leave it out") as caught:
        refuse_unsupported({"user": "u", name: ASKED[name]})
    assert caught.value.param == name
    for value in (None, *NOTHING.get(name, [])):
        refuse_unsupported({name: value})
