"""From a request's fields to the `Sampling` its sequences carry. Knows no default limits, and no logits."""

from services.gateway import schemas
from services.gateway.tokenizer import Codec
from shared.errors import InvalidRequest
from shared.messages.sequence import Sampling

LEAST_TEMPERATURE = 1e-5
LEAST_TOP_P = 1e-6


def sampling_of(request: schemas.CompletionRequest, codec: Codec, seed: int, max_tokens: int) -> Sampling:
    """What a sampler could trip over is moved to where it means the same.

    Raises InvalidRequest for a `min_tokens` above `max_tokens` and for tokens the model does not have.
    """
    temperature = 1.0 if request.temperature is None else float(request.temperature)
    top_p = 1.0 if request.top_p is None else float(request.top_p)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, but the answer may have {max_tokens} tokens at most: "
            "lower it, or raise max_tokens",
            param="min_tokens",
        )
    return Sampling(
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_p=max(top_p, LEAST_TOP_P),
        top_k=min(max(request.top_k or 0, 0), codec.vocab_size),
        end_token_ids=_end_token_ids(request, codec),
        min_p=float(request.min_p or 0.0),
        min_tokens=min_tokens,
        presence_penalty=float(request.presence_penalty or 0.0),
        frequency_penalty=float(request.frequency_penalty or 0.0),
        repetition_penalty=1.0 if request.repetition_penalty is None else float(request.repetition_penalty),
        top_logprobs=request.logprobs_wanted,
    )


def _end_token_ids(request: schemas.CompletionFields, codec: Codec) -> tuple[int, ...]:
    """The model's, unless they are ignored, and the client's own in any case."""
    own = request.stop_token_ids or []
    if any(token >= codec.vocab_size for token in own):
        raise InvalidRequest(f"token ids are from 0 to {codec.vocab_size - 1}", param="stop_token_ids")
    return tuple(dict.fromkeys((*(() if request.ignore_eos else codec.end_token_ids), *own)))
