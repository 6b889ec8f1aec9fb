"""Every command in the docs is run by a test, or says why not.

Those of the tables in docs/recipes.md are run by `make readme-test`, in a clean clone.
"""

import re
import shlex
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.registry import find
from services.stack.obstructions import free_port
from tests.docs.commands import DOCS, FOREGROUND, ROOT, Block, Reader, benches_of, blocks_of, copied, pages

BLOCKS = [block for page in pages() for block in blocks_of(page)]
OWN = [block for block in BLOCKS if not block.note]
PAGES = sorted({block.page for block in OWN})
BENCH_PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (DOCS / "benchmarks").glob("*.md"))
BENCHES = sorted({(name, words) for page in (*pages(), *BENCH_PAGES) for name, words in benches_of(page)})
PLACEHOLDERS = {"DIR": "somewhere", "FILE.yaml": "docs/examples/policies.yaml", "LENGTHS.csv": "lengths.csv"}
_ID = re.compile(r"\breq_[0-9a-f]{32}\b|\bREQUEST_ID\b")


def test_a_block_is_run_here_or_says_by_whom_or_why_not() -> None:
    for block in BLOCKS:
        if block.note:
            assert block.runner or len(block.reason) > 10, (block.page, block.note)
        if block.runner:
            assert (ROOT / block.runner).is_file(), (block.page, block.runner)
    assert len(OWN) > 8


def test_lines_are_read_as_a_shell_reads_them() -> None:
    (curl,) = blocks_of("docs/structured-output.md")
    assert len(curl.lines) == 1 and curl.lines[0].endswith("}}}}'")
    lines = [line for block in blocks_of("docs/tenants.md") for line in block.lines]
    assert lines[1] == "./kvasir keys list"


@pytest.mark.parametrize(("name", "words"), BENCHES)
def test_a_bench_takes_the_flags_that_a_page_gives_it(name: str, words: str, tmp_path: Path) -> None:
    if name in ("record", "data"):
        return
    parser = ArgumentParser(exit_on_error=False)
    for flag in ("--json", "--out", "--seed"):
        parser.add_argument(flag)
    parser.add_argument("--quick", action="store_true")
    find(name).load().add_arguments(parser)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    examples = {**PLACEHOLDERS, "FILE": str(file)}
    given = [examples.get(word, word) for word in shlex.split(words)]
    parser.parse_args([word for word in given if word not in ("A", "B", "N", "NAME")] or given)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reading = Reader(copied(tmp_path_factory.mktemp("docs")), free_port())
    try:
        yield reading
    finally:
        subprocess.run(
            [".venv/bin/python", "-m", "services", "down"], cwd=reading.copy, timeout=120, check=False
        )


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, reader: Reader) -> None:
    for block in blocks_of(page):
        if not block.note:
            _do(block, reader)


def _do(block: Block, reader: Reader) -> None:
    has_function = any("() {" in line for line in block.lines)
    for line in ("\n".join(block.lines),) if has_function else block.lines:
        if line.startswith("make up") or FOREGROUND.search(line):
            reader.types("python -m services down || true")
        elif not line.startswith("python -m bench"):
            reader.types("make up")
        said = reader.types(_prepared(line, reader))
        if "curl" in line:
            assert '"error"' not in said, said


def _prepared(line: str, reader: Reader) -> str:
    """What runs in the foreground runs behind; a request's id becomes that of one that was just answered."""
    if FOREGROUND.search(line):
        return f"{line} --detach"
    if not _ID.search(line):
        return line
    reader.types("python -m services chat --max-tokens 40 'Tell me a story.'")
    logged = reader.types("python -m services logs gateway-0")
    return _ID.sub(re.findall(r"req_[0-9a-f]{32}", logged)[-1], line)


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(1800)
def test_from_a_clone_to_a_swapped_policy_to_a_plot_in_five_commands(tmp_path: Path) -> None:
    """`make dev` finds all installed here; `make readme-test` installs it."""
    (block,) = (block for block in blocks_of("docs/experiments.md") if block.lines[0].startswith("git clone"))
    assert len(block.lines) <= 5
    clone, *rest = block.lines
    assert re.fullmatch(r"git clone \S+ kvasir && cd kvasir", clone)
    reader = Reader(copied(tmp_path), free_port())
    try:
        for line in rest:
            reader.types(line, timeout_s=1200)
        assert "vllm:" in reader.types("python -m services status")
    finally:
        reader.types("python -m services down")
    (picture,) = (reader.copy / "runs" / "experiment").rglob("latency_sharegpt.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
