"""Clients' embeddings: one text, several, and a search among them."""

import litellm
import openai
from langchain_openai import OpenAIEmbeddings

from tests.clients.serving import Serving

TEXTS = ["A dog ran home.", "Rain fell on the roof.", "A dog ran home again."]


def test_openai_and_litellm_and_langchain_agree(stack: Serving) -> None:
    client = openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0)
    found = client.embeddings.create(model=stack.model, input=TEXTS)
    own = [each.embedding for each in found.data]
    theirs = litellm.embedding(
        f"openai/{stack.model}", input=TEXTS, api_base=stack.base_url, api_key=stack.key, max_retries=0
    )
    chained = OpenAIEmbeddings(
        model=stack.model, base_url=stack.base_url, api_key=stack.key, check_embedding_ctx_length=False
    ).embed_documents(TEXTS)
    for one, two, three in zip(own, [each["embedding"] for each in theirs.data], chained, strict=True):
        assert max(abs(a - b) + abs(a - c) for a, b, c in zip(one, two, three, strict=True)) < 1e-3


def test_what_is_alike_is_near(stack: Serving) -> None:
    client = openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0)
    first, rain, again = (
        each.embedding for each in client.embeddings.create(model=stack.model, input=TEXTS).data
    )
    assert abs(sum(a * a for a in first) - 1.0) < 1e-5

    def nearness(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert nearness(first, again) > nearness(first, rain)
