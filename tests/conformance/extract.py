"""Cuts the schemas we answer with out of OpenAI's API description, so that a clone without it can be tested.

`python -m tests.conformance.extract PATH/openai-openapi.json` rewrites `openai_schemas.json` here.
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXTRACT = HERE / "openai_schemas.json"
ROOTS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateEmbeddingResponse",
    "ErrorResponse",
    "ListModelsResponse",
    "Model",
    "Response",
    "ResponseStreamEvent",
)
_PROSE = ("description", "example", "examples", "x-oaiMeta", "title")


def references(node: Any) -> set[str]:
    """Names of the component schemas that `node` refers to directly."""
    if isinstance(node, dict):
        own = {str(node["$ref"]).rsplit("/", 1)[-1]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


def without_prose(node: Any, *, of_properties: bool = False) -> Any:
    """`node` without what only people read; property names that happen to be such words stay."""
    if isinstance(node, dict):
        return {
            key: without_prose(value, of_properties=key == "properties" and not of_properties)
            for key, value in node.items()
            if of_properties or key not in _PROSE
        }
    if isinstance(node, list):
        return [without_prose(value) for value in node]
    return node


def extract(description: dict[str, Any]) -> dict[str, Any]:
    """The root schemas and everything they refer to, as components of an OpenAPI document."""
    schemas = description["components"]["schemas"]
    wanted: set[str] = set()
    todo = set(ROOTS)
    while todo:
        name = todo.pop()
        wanted.add(name)
        todo |= references(schemas[name]) - wanted
    return {
        "info": {key: description["info"][key] for key in ("title", "version", "license")},
        "components": {"schemas": {name: without_prose(schemas[name]) for name in sorted(wanted)}},
    }


if __name__ == "__main__":
    source = json.loads(Path(sys.argv[1]).read_text())
    EXTRACT.write_text(json.dumps(extract(source), indent=1, sort_keys=True) + "\n")
