"""The unit of the corpus: a conversation of a known kind, and its turn markers.

Knows the chat format; does not know where conversations come from or how they are tokenized.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PAD, BOS, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Chat:
    """One conversation: `turns` are (role, text) pairs and end with the assistant; `kind` names the task."""

    kind: str
    turns: tuple[tuple[str, str], ...]

    def prompt(self) -> str:
        """The rendered conversation up to and including the last assistant marker."""
        head = "".join(f"<|{role}|>{text.strip()}{END}" for role, text in self.turns[:-1])
        return BOS + head + ASSISTANT

    def answer(self) -> str:
        """The last assistant turn without its end marker."""
        return self.turns[-1][1].strip()


def ask(kind: str, question: str, answer: str) -> Chat:
    """A conversation of one question and one answer."""
    return Chat(kind, (("user", question), ("assistant", answer)))


def data_folder() -> Path:
    """`$KVASIR_DATA`, else `../shared/data` beside the repository."""
    if given := os.environ.get("KVASIR_DATA"):
        return Path(given)
    return Path(__file__).resolve().parents[3] / "shared" / "data"
