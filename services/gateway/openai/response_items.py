"""The items of a response's conversation, as `/v1/responses/{id}/input_items` lists them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InvalidRequest

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_MOST_LISTED = 100


def listed(name: str, items: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the conversation up to the response `name`.

    `wanted` holds the query: `limit` (1 to 100, default 20), `order` (`asc`, default `desc`) and `after`, an
    item's id. Raises InvalidRequest.
    """
    limit, order = wanted.get("limit", "20"), wanted.get("order", "desc")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _MOST_LISTED):
        raise InvalidRequest(f"limit is from 1 to {_MOST_LISTED}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc", param="order")
    found = [_resource(name, item, at) for at, item in enumerate(items)]
    if order == "desc":
        found.reverse()
    if (after := wanted.get("after")) is not None:
        ids = [item["id"] for item in found]
        if after not in ids:
            raise InvalidRequest("after should be the id of an item", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[: int(limit)]
    ends = [item["id"] for item in (page[:1] + page[-1:])] or ["", ""]
    head = {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1]}
    return {**head, "has_more": len(found) > len(page)}


def _resource(name: str, item: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Return the item with its optional id and text parts filled in."""
    kind = item.get("type", "message")
    own = f"{_PREFIXES.get(kind, 'item')}_{name.removeprefix('resp_')}_in{at}"
    found = {**item, "id": item.get("id") or own, "type": kind}
    if kind != "reasoning":
        found.setdefault("status", "completed")
    if kind == "message" and isinstance(text := item.get("content"), str):
        is_said = item.get("role") == "assistant"
        part = (
            {"type": "output_text", "annotations": [], "logprobs": []} if is_said else {"type": "input_text"}
        )
        found["content"] = [{**part, "text": text}]
    return found
