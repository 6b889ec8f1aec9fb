"""Texts of borrowed KV, beside one worker's, whose sums are added in another order.

In fp32 the text is the same. Where activations or KV are rounded to fewer bits, the last bits of a sum decide
now and then which way, so a text may differ; then each of its tokens must be as good as the likeliest one."""

import os
from collections.abc import Sequence

import httpx

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Answer
from tests.stack.running import RunningStack

WITH_IDS = {"return_token_ids": True}
"""Field of the questions whose answers are judged."""
_FORMATS = {os.environ.get(f"KVASIR_WORKER__{name}", "auto") for name in ("WEIGHTS", "KV_DTYPE")}
SLACK = 0.5 if _FORMATS & {"int8", "int4", "bfloat16"} else 0.0
"""Most that a token's logarithm of probability may lie below the likeliest one's: a change of one layer by
1e-7 moves it by up to 0.2 in these formats."""


async def assert_as_good(judge: RunningStack, answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The expected texts, or ones that `judge` could say as well."""
    for answer, wanted in zip(answers, expected, strict=True):
        if answer.text != wanted.text:
            gaps = await _gaps(judge, answer)
            assert max(gaps) <= SLACK, f"{answer.text}\nnot {wanted.text}\n{gaps}"


async def _gaps(judge: RunningStack, answer: Answer) -> list[float]:
    """Return how far each token lies below the likeliest one after the same text."""
    body = {"model": judge.model.name, "prompt": answer.prompt + answer.tokens, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=judge.url, timeout=STACK_PATIENCE_S) as http:
        headers = {"Authorization": f"Bearer {judge.key}"}
        reply = await http.post("/v1/completions", json={**body, "prompt_logprobs": 1}, headers=headers)
    rows = reply.json()["choices"][0]["prompt_logprobs"][-len(answer.tokens) :]
    return [
        max(each["logprob"] for each in row.values()) - row[str(token)]["logprob"]
        for token, row in zip(answer.tokens, rows, strict=True)
    ]
