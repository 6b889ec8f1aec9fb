"""Of two workers with different weights under one name the later is refused, and nobody is answered by it."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.stack.client import Question
from tests.stack.running import TINY_CHAT, running_stack

pytestmark = pytest.mark.stack
PROMPT = "Tell me a short story."


def other_weights(folder: Path) -> Path:
    """`tiny_chat` with one tensor turned around."""
    shutil.copytree(TINY_CHAT, folder, ignore=shutil.ignore_patterns("*.md"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if "mlp" in name)
    save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_it_gets_no_work_and_status_and_log_say_why(tmp_path: Path) -> None:
    model = other_weights(tmp_path / "tiny_chat")
    with running_stack(tmp_path / "run", settings=(f"worker-1.model={model}",)) as stack:
        client = stack.client()
        questions = [Question(PROMPT, {"temperature": 0, "max_tokens": 40}) for _ in range(8)]
        answers = await client.ask_all(questions)
        assert all(answer.complete for answer in answers) and len({answer.text for answer in answers}) == 1
        rows = {row["worker"]: row for row in stack.details("scheduler-0")["workers"]}
        assert sorted(row["sync"] for row in rows.values()) == ["in_step", "refused"], rows
        (refused,) = [row["refused"] for row in rows.values() if row["sync"] == "refused"]
        assert "different weights" in refused
        assert "model_mismatch" in (stack.run_dir / "logs" / "scheduler-0.log").read_text()
