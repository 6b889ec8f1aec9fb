"""Schemas from JSON Schema's test suite, and combinations of them.

The suite is in the source archive of the package jsonschema; `deploy/locks/dev.txt` pins its digest.
"""

import hashlib
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import InternalError

Schema = dict[str, Any]
_DRAFT = "draft2020-12"
_BOUND_TO_ITS_PLACE = ("$ref", "$dynamicRef", "$id", "$anchor", "$dynamicAnchor", "$vocabulary")
"""Keywords whose meaning depends on their place in the whole schema."""
_MOST_CHARACTERS = 4000


def suite_schemas(source: Path) -> list[Schema]:
    """Return the object schemas of all test groups, without expressions that Python cannot read (`\\p`).

    `source` is the archive, or a folder of the suite such as …/draft2020-12. Raises InternalError if it has
    no tests.
    """
    groups = [group for text in _files(source) for group in json.loads(text)]
    schemas = [group["schema"] for group in groups if isinstance(group.get("schema"), dict)]
    found = [schema for schema in schemas if "\\\\p" not in json.dumps(schema)]
    if not found:
        raise InternalError(f"{source} has no tests of JSON Schema")
    return found


def digest_of(source: Path) -> str:
    """Return the SHA-256, in hex, of the archive or of the folder's files."""
    if source.is_file():
        return hashlib.sha256(source.read_bytes()).hexdigest()
    return hashlib.sha256("\n".join(_files(source)).encode()).hexdigest()


def derived(schemas: Sequence[Schema], count: int, draw: random.Random) -> list[Schema]:
    """Return `count` different schemas, combined from `schemas` by nesting, choice and sequence to a depth of
    two.

    Raises InternalError if fewer than two can be combined.
    """
    parts = [
        {name: value for name, value in schema.items() if name != "$schema"}
        for schema in schemas
        if not _is_bound(schema)
    ]
    if len(parts) < 2:
        raise InternalError("nothing of the suite can be a part of another schema")
    found: dict[str, Schema] = {}
    while len(found) < count:
        made = _combined(parts, draw, depth=draw.randint(1, 2), is_whole=True)
        text = json.dumps(made, sort_keys=True)
        if len(text) <= _MOST_CHARACTERS:
            found[text] = made
    return list(found.values())


def _combined(parts: Sequence[Schema], draw: random.Random, depth: int, is_whole: bool = False) -> Schema:
    if depth == 0:
        return draw.choice(parts)
    several = [_combined(parts, draw, depth - 1) for _ in range(draw.randint(1, 3))]
    kind = draw.choice(("object", "array", "anyOf", "prefixItems", "$ref"))
    if kind == "object":
        names = [f"part_{at}" for at in range(len(several))]
        properties = dict(zip(names, several, strict=True))
        required = [name for name in names if draw.random() < 0.7]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        return {"type": "array", "items": several[0], "minItems": 1, "maxItems": len(several)}
    if kind == "prefixItems":
        return {"type": "array", "prefixItems": several, "items": False, "minItems": len(several)}
    if kind == "anyOf" or not is_whole:
        return {"anyOf": several}
    return {"$defs": {"it": several[0]}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 2}


def _is_bound(schema: Any) -> bool:
    if isinstance(schema, dict):
        return any(name in schema for name in _BOUND_TO_ITS_PLACE) or any(map(_is_bound, schema.values()))
    return isinstance(schema, list) and any(map(_is_bound, schema))


def _files(source: Path) -> list[str]:
    if source.is_dir():
        return [file.read_text(encoding="utf-8") for file in sorted(source.glob("*.json"))]
    try:
        with tarfile.open(source) as archive:
            members = [
                member
                for member in archive.getmembers()
                if member.isfile() and Path(member.name).parts[-3:-1] == ("tests", _DRAFT)
            ]
            named = sorted(members, key=lambda member: member.name)
            return [file.read().decode() for member in named if (file := archive.extractfile(member))]
    except (OSError, tarfile.TarError) as error:
        raise InternalError(f"{source} cannot be read: {error}") from error
