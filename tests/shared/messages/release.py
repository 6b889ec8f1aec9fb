"""What a release says on the bus: every message with its fields, types, bounds and defaults, as JSON.

`python -m tests.shared.messages.release` writes this code's into `releases/PROTOCOL.json`; it is done when a
release is made, and never again for that release.
"""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import msgspec

from shared import messages
from shared.release import PROTOCOL

RELEASES = Path(__file__).with_name("releases")
_ASIDE = ("title", "description")
"""What nobody on the bus sees."""


def described() -> dict[str, Any]:
    """Each message's fields by name, of this code."""
    found = [
        kind
        for module in pkgutil.iter_modules(messages.__path__)
        for kind in vars(importlib.import_module(f"shared.messages.{module.name}")).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == f"shared.messages.{module.name}"
    ]
    _, components = msgspec.json.schema_components(found)
    return dict(sorted((name, _plain(schema)) for name, schema in components.items()))


def _plain(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: {name: _plain(field) for name, field in value.items()}
            if key == "properties"
            else _plain(value)
            for key, value in schema.items()
            if key not in _ASIDE
        }
    return [_plain(each) for each in schema] if isinstance(schema, list | tuple) else schema


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Why processes of both would not understand each other, in either direction; empty: they do.

    Old readers pass over what they do not know and want what they require; what is not sent has the reader's
    default, hence defaults are equal, and what one release requires the other always sends.
    """
    found = []
    for name, before in old.items():
        now = new.get(name)
        if now is None:
            found.append(f"{name} is gone")
        elif "prefixItems" in before:
            length = len(before["prefixItems"])
            if now.get("prefixItems", [])[:length] != before["prefixItems"]:
                found.append(f"{name} is another row than before")
            if now.get("minItems") != before.get("minItems"):
                found.append(
                    f"{name} has {now.get('minItems')} elements or more, not {before.get('minItems')}"
                )
        elif "properties" in before:
            fields = now.get("properties", {})
            found += [
                f"{name}.{field} is {fields.get(field, 'gone')}, not {kind}"
                for field, kind in before["properties"].items()
                if fields.get(field) != kind
            ]
            unequal = set(now.get("required", ())) ^ set(before["required"])
            if unequal:
                found.append(f"{name} requires or sends always: {', '.join(sorted(unequal))}, in one of both")
        elif now != before:
            found.append(f"{name} is {now}, not {before}")
    return found


def main() -> None:
    """One message a line, so that a difference can be read."""
    RELEASES.mkdir(exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(kind, sort_keys=True)}" for name, kind in described().items()]
    (RELEASES / f"{PROTOCOL}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
