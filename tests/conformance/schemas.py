"""Validates a response body against OpenAI's own description of it."""

import json
from typing import Any

from jsonschema import Draft202012Validator

from tests.conformance.extract import EXTRACT


def as_json_schema(node: Any) -> Any:
    """OpenAPI 3.0 writes "or null" as `nullable: true`; JSON Schema wants it among the types and values."""
    if isinstance(node, list):
        return [as_json_schema(value) for value in node]
    if not isinstance(node, dict):
        return node
    schema = {key: as_json_schema(value) for key, value in node.items() if key != "nullable"}
    if node.get("nullable") is not True:
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def validator(name: str) -> Draft202012Validator:
    """A validator for the component schema `name`."""
    components = as_json_schema(json.loads(EXTRACT.read_text())["components"])
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


def violations(name: str, body: Any) -> list[str]:
    """What is wrong with `body` as a `name`, one line a fault; empty when it conforms."""
    return [
        f"{'/'.join(map(str, error.absolute_path)) or '(root)'}: {error.message}"
        for error in validator(name).iter_errors(body)
    ]


def closed(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all of these properties, and no others."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
