"""docs/clients.md does what it says: each client there chats with a stack by the page's own snippet.

Agents get an MCP server beside, with one tool that they call and whose answer goes back to the model.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.between import Between
from tests.clients.sealed import SEAL
from tests.clients.serving import ROOT, SUFFIX, Serving, long_model, serving
from tests.clients.weather_mcp import ANSWER

PAGE = ROOT / "docs" / "clients.md"
NPM = ROOT / f".npm-clients{SUFFIX}" / "node_modules"
AIDER = ROOT / f".venv-aider{SUFFIX}" / "bin"
LIMIT_S = 540
"""Of one snippet: two conversations of some 30,000 tokens, on a machine that does other things as well."""
pytestmark = pytest.mark.timeout(LIMIT_S + 60)
MCP = [sys.executable, str(ROOT / "tests" / "clients" / "weather_mcp.py")]
_SERVER = {"command": MCP[0], "args": MCP[1:]}
TOOL_SERVERS = {
    "Claude Code": {
        "~/.claude.json": json.dumps({"mcpServers": {"sky": _SERVER}}),
        "~/.claude/settings.json": json.dumps({"permissions": {"allow": ["mcp__sky__weather"]}}),
    },
    "Codex": {"~/.codex/config.toml": f"[mcp_servers.sky]\ncommand = {MCP[0]!r}\nargs = {MCP[1:]}\n"},
    "opencode": {
        "~/.config/opencode/opencode.json": json.dumps({"mcp": {"sky": {"type": "local", "command": MCP}}})
    },
    "Cline": {"~/.cline/data/settings/cline_mcp_settings.json": json.dumps({"mcpServers": {"sky": _SERVER}})},
    "Continue": {"~/.continue/config.yaml": f"mcpServers: [{json.dumps({'name': 'sky', **_SERVER})}]\n"},
    "qwen-code": {"~/.qwen/settings.json": json.dumps({"mcpServers": {"sky": {**_SERVER, "trust": True}}})},
}
"""Files that tell each agent of the tool, added to what the page has."""
_BLOCK = re.compile(r"(?:`(\S+)`:\n\n)?^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks_of(section: str) -> list[tuple[str, str, str]]:
    """File, language and text of every block in a section of the page."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return _BLOCK.findall(text)


@pytest.fixture(scope="module")
def long_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A stack whose model takes as many tokens as an agent sends."""
    folder = tmp_path_factory.mktemp("long")
    with serving(folder / "run", f"--model=tiny_chat={long_model(folder / 'model')}") as started:
        yield started


@pytest.fixture(scope="module")
def _can_seal() -> None:
    if subprocess.run([*SEAL, "true"], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("clients are kept on 127.0.0.1 by a network namespace, and this machine makes none")


def _typed(section: str, link: Between, key: str, home: Path) -> str:
    """Write the section's files, type its commands in a directory of `home`; what they print."""
    if section != "aider" and not (NPM.is_dir() and shutil.which("node")):
        pytest.skip("this client is an npm package, and Node.js with npm was not here at set-up")
    work = home / "work"
    work.mkdir()
    (work / "node_modules").symlink_to(NPM)
    (work / "hello.py").write_text("print('hello')\n")
    blocks = blocks_of(section)
    files = [(name, text) for name, _, text in blocks if name]
    for name, text in [*files, *TOOL_SERVERS.get(section, {}).items()]:
        path = home / name[2:] if name.startswith("~/") else work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else ""
        is_json = before and path.suffix == ".json"
        path.write_text(json.dumps(json.loads(before) | json.loads(text)) if is_json else before + text)
    script = "".join(text for _, language, text in blocks if language == "sh")
    folders = (NPM / ".bin", AIDER, os.environ["PATH"])
    environment = {"HOME": str(home), "KEY": key, "PATH": ":".join(map(str, folders)), "DO_NOT_TRACK": "1"}
    return link.run(["bash", "-euc", script], environment, work, LIMIT_S)


@pytest.mark.usefixtures("_can_seal")
@pytest.mark.parametrize("section", TOOL_SERVERS)
def test_an_agent_calls_a_tool_and_goes_on(section: str, long_stack: Serving, tmp_path: Path) -> None:
    """Claude Code and Codex could not even begin: a field or a role of theirs was refused."""
    link = Between(long_stack.base_url, "weather")
    said = _typed(section, link, long_stack.key, tmp_path)
    refused = [(each.path, each.answer) for each in link.passed if each.body and each.status != 200]
    assert not refused, said
    assert [each.forced for each in link.passed if each.forced], said
    told = [each.body for each in link.passed if ANSWER in each.body]
    assert told, f"the model is not told what the tool says: {said}"
    if section != "Cline":  # which goes on by the id of a session only
        assert any("Is that warm?" in body for body in told), said


@pytest.mark.usefixtures("_can_seal")
@pytest.mark.parametrize("section", ["aider", "Vercel AI SDK"])
def test_a_command_is_answered(section: str, stack: Serving, tmp_path: Path) -> None:
    link = Between(stack.base_url, "no tool")
    assert _typed(section, link, stack.key, tmp_path).strip()
    assert {each.status for each in link.passed if each.body} == {200}
    assert (tmp_path / "work" / "hello.py").read_text() == "print('hello')\n"


@pytest.mark.parametrize("section", ["LangChain", "LlamaIndex", "LiteLLM"])
def test_a_library_is_answered(section: str, stack: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, _, text),) = blocks_of(section)
    exec(text.replace("http://127.0.0.1:8080/v1", stack.base_url), {"KEY": stack.key})
    assert len(capsys.readouterr().out) > 10
