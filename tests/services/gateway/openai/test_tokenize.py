"""/tokenize and /detokenize: vLLM's shapes, the ids the completions use, refusals that name the field."""

from typing import Any

from services.gateway.openai.tokenize import MAX_DETOKENIZED_TOKENS
from tests.services.gateway.conftest import ANSWER, MakeStack, Stack
from tests.services.gateway.fakes import MODEL

CHAT = [{"role": "user", "content": "hello"}]


async def test_a_text_there_and_back(stack: Stack) -> None:
    reply = (await stack.http.post("/tokenize", json={"model": MODEL, "prompt": ANSWER})).json()
    tokens = stack.codec.encode_text(ANSWER)
    assert reply == {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None}
    back = await stack.http.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert back.json() == {"prompt": "<|bos|>" + ANSWER}
    assert (await stack.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_chat_is_what_completions_compute(stack: Stack) -> None:
    reply = (await stack.http.post("/tokenize", json={"messages": CHAT})).json()
    whole = (await stack.chat(max_tokens=1)).json()
    assert reply["count"] == whole["usage"]["prompt_tokens"]
    fields = {"messages": CHAT, "add_generation_prompt": False, "return_token_strs": True}
    shorter = (await stack.http.post("/tokenize", json=fields)).json()
    assert reply["tokens"][: shorter["count"]] == shorter["tokens"] != reply["tokens"]
    assert "".join(shorter["token_strs"]) == "<|bos|><|user|>hello<|end|>\n"


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": CHAT}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": CHAT, "tools": [{}]}, 400, "tools[0].function"),
    ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 99999]}, 400, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ("/detokenize", {"tokens": [1] * (MAX_DETOKENIZED_TOKENS + 1)}, 400, "tokens"),
]


async def test_refusals(stack: Stack) -> None:
    for path, body, status, param in BAD:
        reply = await stack.http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), (path, body)


async def test_keys_and_sizes_are_as_everywhere(make_stack: MakeStack) -> None:
    stack = await make_stack(max_body_bytes=1000)
    for path, body in (("/tokenize", {"prompt": "x" * 2000}), ("/detokenize", {"tokens": [5] * 1000})):
        assert (await stack.http.post(path, json=body)).status_code == 413
        stranger = await stack.http.post(path, json=body, headers={"authorization": "Bearer no"})
        assert stranger.status_code == 401
        assert (await stack.http.get(path)).status_code == 405
