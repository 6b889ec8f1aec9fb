"""The permission table of `shared.subjects`, as nats-server wants to read it.

It judges nothing: what a user may do is decided there and enforced by the server.
"""

import json
from collections.abc import Mapping

from shared.subjects import Permissions, permissions_of

_ANSWER_WITHIN = "2m"
"""Longer than any deadline of a question on the bus."""


def users_text(passwords: Mapping[str, str]) -> str:
    """One entry per user. Raises ValueError for a name that is no user's."""
    return "\n".join(
        f"      {{ user: {json.dumps(user)}, password: {json.dumps(password)}, "
        f"permissions: {_permissions(permissions_of(user))} }}"
        for user, password in passwords.items()
    )


def _permissions(permissions: Permissions) -> str:
    publish = f"publish: {_subjects(permissions.publish)}, subscribe: {_subjects(permissions.subscribe)}"
    answers = (
        f', allow_responses: {{ max: 1, expires: "{_ANSWER_WITHIN}" }}' if permissions.may_answer else ""
    )
    return f"{{ {publish}{answers} }}"


def _subjects(allowed: tuple[str, ...]) -> str:
    """An empty list would allow everything."""
    return f"{{ allow: {json.dumps(allowed)} }}" if allowed else '{ deny: ">" }'
