"""POST /v1/embeddings: the last hidden state of each text, normalized to length one. Each text is a sequence
that generates one token. For the mean over all tokens, all but the first are forced, one per step, as for
prompt log-probabilities: slow, but it survives a hand-over."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from services.gateway.errors import UnsupportedFeature
from services.gateway.openai.admission import Acceptance, AdmittedRequest, ContextLimit
from services.gateway.openai.fields import Ignored
from services.gateway.openai.replies import AnswerWriter, FinishedChoice, Usage
from services.gateway.openai.schemas import EmbeddingRequest, parse_object, validated
from services.gateway.text.choice_text import Given, TextRules
from shared.errors import InvalidRequest
from shared.messages.sequence import Sampling, pack_tokens

MAX_INPUTS = 2048


async def admit_embeddings(
    acceptance: Acceptance, body: bytes, context: ContextLimit
) -> tuple[AdmittedRequest, EmbeddingRequest]:
    """Return a job of one sequence per text, and the request. Raises InvalidRequest (or a subclass),
    Overloaded, or what `context` raises."""
    ignored = acceptance.ignored()
    request = await acceptance.threads.read(lambda: _checked(acceptance, body, ignored), len(body))
    adds_special = request.add_special_tokens is not False
    prompts = await acceptance.threads.encode(
        lambda: [acceptance.encode(each, "input", adds_special=adds_special) for each in request.input],
        len(body),
    )
    context_tokens = await context()
    most = request.truncate_prompt_tokens
    most = context_tokens - 1 if most == -1 else most
    prompts = [prompt if most is None else prompt[-most:] for prompt in prompts]
    for prompt in prompts:
        acceptance.limit("input", len(prompt), 1, context_tokens)
    given = [len(prompt) - 1 if acceptance.pools_mean else 0 for prompt in prompts]
    job = AdmittedRequest(
        kind="embedding",
        prompts=tuple(tuple(p[: len(p) - end]) for p, end in zip(prompts, given, strict=True)),
        samplings=tuple(_sampling(p[len(p) - end :]) for p, end in zip(prompts, given, strict=True)),
        n=1,
        rules=TextRules(sums_hidden=acceptance.pools_mean),
        given=tuple(Given(end) for end in given),
        stream=False,
        include_usage=True,
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        ignored=ignored.names,
        prompt_tokens=sum(map(len, prompts)),
    )
    return job, request


def _sampling(forced: Sequence[int]) -> Sampling:
    """Return the sampling of a sequence that reports its hidden states."""
    return Sampling(
        seed=0,
        max_tokens=1 + len(forced),
        temperature=0.0,
        top_logprobs=0,
        embeds=True,
        forced=pack_tokens(forced),
    )


def _checked(acceptance: Acceptance, body: bytes, ignored: Ignored) -> EmbeddingRequest:
    request = validated(EmbeddingRequest, parse_object(body))
    acceptance.check_fields(request, ignored)
    if len(request.input) > MAX_INPUTS:
        raise InvalidRequest(f"input may have {MAX_INPUTS} texts at most", param="input")
    _check_dimensions(request.dimensions, acceptance.codec.hidden_size)
    if request.truncate_prompt_tokens == 0:
        text = "truncate_prompt_tokens should be at least 1, or -1"
        raise InvalidRequest(text, param="truncate_prompt_tokens")
    return request


def _check_dimensions(wanted: int | None, most: int) -> None:
    if most and (wanted or 0) > most:
        raise InvalidRequest(f"dimensions is from 1 to {most}, which this model has", param="dimensions")


class EmbeddingWriter(AnswerWriter):
    """`AnswerWriter` for embeddings, which are never streamed."""

    def __init__(self, model: str, request: EmbeddingRequest) -> None:
        self._model = model
        self._is_packed = request.encoding_format == "base64"
        self._dimensions = request.dimensions

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """Return the body. Raises UnsupportedFeature if the workers report no hidden states."""
        data = [
            {"object": "embedding", "index": choice.index, "embedding": self._vector(choice.hidden)}
            for choice in choices
        ]
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        content = {"object": "list", "data": data, "model": self._model, "usage": counts}
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)

    def _vector(self, hidden: bytes) -> Any:
        if not hidden:
            raise UnsupportedFeature("this model's workers give no embeddings", param="model")
        vector = unit(hidden)
        if self._dimensions is not None:
            _check_dimensions(self._dimensions, len(vector))
            vector = unit(vector[: self._dimensions].tobytes())
        return base64.b64encode(vector.tobytes()).decode() if self._is_packed else vector


def unit(hidden: bytes) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return packed fp32 as a vector of length one; zeros stay zeros."""
    vector = np.frombuffer(hidden, dtype="<f4").astype(np.float64)
    length = float(np.linalg.norm(vector))
    return (vector / (length or 1.0)).astype("<f4")
