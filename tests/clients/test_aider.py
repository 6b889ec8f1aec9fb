"""aider, from an environment of its own: it asks about a file, whole and streamed, and changes nothing."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.loopback import quiet_environment
from tests.clients.serving import ROOT, Serving

AIDER_PYTHON = ROOT / ".venv-aider" / "bin" / "python"
FLAGS = (
    *("--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"),
    *("--no-pretty", "--map-tokens", "0", "--no-show-release-notes", "--no-detect-urls"),
    *("--edit-format", "ask"),
)


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_it_is_answered(stack: Serving, tmp_path: Path, flag: str) -> None:
    prices = tmp_path / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text(json.dumps({"none": {}}))  # which it would download otherwise
    file = tmp_path / "hello.py"
    file.write_text("print('hello')\n")
    words = ["--model", f"openai/{stack.model}", *FLAGS, flag, "--message", "Say hello.", str(file)]
    environment = quiet_environment(os.environ) | {
        "OPENAI_API_KEY": stack.key,
        "OPENAI_API_BASE": stack.base_url,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [AIDER_PYTHON, "-m", "tests.clients.loopback", "aider", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tokens:" in done.stdout and "received" in done.stdout, done.stdout
    assert file.read_text() == "print('hello')\n"
