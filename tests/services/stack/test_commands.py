"""The command line: what is refused, and with which exit code; `logs`, `models`, and traces for Perfetto."""

import io
import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import services
from services.stack import models
from services.stack.chrome_trace import chrome_trace
from services.stack.cli import main
from services.stack.explain import in_words
from services.stack.logs import _news, logs, reason
from services.stack.rundir import ROOT, RunDirectory
from shared.errors import ConfigError
from shared.model_files import HubId
from shared.release import VERSION

UP = ["up", "--port=0", "--nats-port=0", "--model=tiny_chat"]


def test_without_a_stack_commands_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = ["--run-dir", str(tmp_path)]
    assert main(["status", *where]) == 1 and main(["status", "--json", *where]) == 1
    assert '{"running": false}' in capfd.readouterr().out and main(["chat", *where, "hello"]) == 1
    assert f"kvasir up --run-dir {tmp_path}` starts it" in capfd.readouterr().err
    assert main(["down", *where]) == 0 and f"nothing runs from {tmp_path}" in capfd.readouterr().out


def test_the_root_has_the_command_and_it_completes(tmp_path: Path) -> None:
    """`./kvasir` runs from any folder, says its version, and its completion script is valid shell."""
    command = str(Path(services.__file__).parent.parent / "kvasir")
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60, cwd="/", check=True)
    assert run([command, "--version"]).stdout == f"kvasir {VERSION}\n"
    script = run([command, "completion", "bash"]).stdout
    assert "credentials" in script
    run(["bash", "-n"], input=script)
    words = ["experiment", str(ROOT / "docs/examples/policies.yaml"), "--dry-run", "--out", str(tmp_path)]
    assert "cells_to_run" in run([command, *words]).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--without", "nope"], "invalid choice: 'nope' (choose from"),
        (["up", "--port", "many"], "port: Input should be a valid integer"),
        (["up", "--set", "nonsense"], "--set 'nonsense': write it as section.setting=value"),
        ([*UP, "--workers", "0"], "workers: "),
        ([*UP, "--config", "none.yaml"], "none.yaml"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["statsu"], "'statsu' is unknown; did you mean 'status'?"),
        (["up", "--worker", "3"], "unrecognized argument --worker; did you mean --workers?"),
        (["status", "--jsn"], "unrecognized argument --jsn; did you mean --json?"),
        ([*UP, "--set", "woker.kv_blocks=64"], "--set woker.kv_blocks: no section 'woker'; did you mean"),
        ([*UP, "--set", "worker.kv_block=64"], "--set worker.kv_block is no setting; did you mean --set w"),
        (
            [*UP, "--set", "gateway.stored_responses.enabled=true"],
            "nothing is below --set gateway.stored_responses, which is one value",
        ),
        (
            ["up", "--model=tiny_chat", "--run-dir", "/proc/kvasir"],
            "the run directory /proc/kvasir cannot be written",
        ),
        (["up", "--detach", "--run-dir", "/proc/kvasir"], "the run directory /proc/kvasir cannot be written"),
        (["logs", "--run-dir", "/nowhere"], "/nowhere has no logs"),
        (["keys", "list", "--run-dir", "/nowhere"], "--run-dir comes directly after `kvasir keys`"),
        ([*UP, "--model", "tiny_chart"], "or a local model; did you mean 'tiny_chat'?"),
        (
            [*UP, "--engine", "vllm", "--vllm-python", "/nowhere/python"],
            "/nowhere/python is not there: run `make setup-vllm`, or name a Python",
        ),
    ],
)
def test_every_error_is_one_sentence_of_one_form(
    words: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No usage text, no traceback, no name of an internal setting that nobody wrote."""
    where = ["--run-dir", str(tmp_path)] if words[: len(UP)] == UP else []
    try:
        code: object = main([*words, *where])
    except SystemExit as ended:
        code = ended.code
    out, err = capfd.readouterr()
    assert code == 2 and out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ") and said in line


def test_help_shows_what_holds_without_a_flag(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    said = " ".join(capfd.readouterr().out.split())
    for default in ("takes a free one [8080]", "how many workers [2]", "start has failed [180]"):
        assert default in said


def test_a_full_disk_is_said_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3_000_000))
    assert main(["up", "--run-dir", str(tmp_path / "run")]) == 2
    assert "is full: 3 MB free, 100 MB wanted" in capfd.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def write(run: RunDirectory, name: str, *entries: "tuple[str, str, str] | str") -> Path:
    path = run.logs / f"{name}.log"
    with path.open("a") as file:
        for entry in entries:
            if isinstance(entry, str):
                file.write(entry + "\n")
            else:
                at, level, event = entry
                line = {"time": f"2026-01-01T00:00:{at}+00:00", "level": level, "event": event, "blocks": 3}
                file.write(json.dumps({**line, "instance": name, "service": "x"}) + "\n")
    return path


def shown(run: RunDirectory, *names: str, lines: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    assert logs(run, console, names, lines=lines) == 0 and isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_lines_of_all_in_order_without_json(run: RunDirectory) -> None:
    write(run, "worker-0", ("01.000", "info", "first"), ("03.000", "error", "third"))
    write(run, "nats", "[1] plain words")
    write(run, "gateway-0", ("02.000", "warning", "second"))
    told = shown(run)
    assert [line.split()[0] for line in told] == ["nats", "worker-0", "gateway-0", "worker-0"]
    assert told[0].endswith("[1] plain words")
    assert told[1].endswith("INFO    first blocks=3") and "{" not in told[1]
    assert [line.split() for line in shown(run, "worker-0", lines=1)] == [told[-1].split()]


def test_what_comes_is_shown_once_whole_and_in_order_whoever_it_is_of(run: RunDirectory) -> None:
    """The first line of each look was lost, and files were shown one after the other."""
    write(run, "worker-0", ("01.000", "info", "before"))
    first = write(run, "gateway-0", ("02.000", "info", "before"))
    files, ends = {path.stem: path for path in run.logs.glob("*.log")}, dict[str, int]()
    assert len(_news(files, ends)) == 2 and _news(files, ends) == []
    write(run, "worker-0", ("05.000", "info", "third"), ("06.000", "info", "fourth"))
    write(run, "gateway-0", ("04.000", "info", "second"))
    files["worker-1"] = write(run, "worker-1", ("03.000", "info", "first"))
    said = [(name, line.split()[2]) for _, name, line in _news(files, ends)]
    named = [f"{name} {text}" for name, text in said]
    assert named == ["worker-1 first", "gateway-0 second", "worker-0 third", "worker-0 fourth"]
    with first.open("a") as file:
        file.write("half a")
    assert _news(files, ends) == []
    with first.open("a") as file:
        file.write(" line\n")
    assert [line for _, _, line in _news(files, ends)] == ["half a line"]
    first.write_text("begun anew\n")
    assert [line for _, _, line in _news(files, ends)] == ["begun anew"]


def test_a_name_without_a_log_is_refused_with_those_there_are(run: RunDirectory) -> None:
    write(run, "worker-0", "x")
    with pytest.raises(ConfigError, match="no log of 'worker-9'; there are worker-0"):
        logs(run, Console(file=io.StringIO()), ["worker-9"])


def test_the_reason_of_an_end_is_the_last_error_that_was_said(run: RunDirectory) -> None:
    path = write(run, "worker-0", ("01.000", "error", "config_error: too small"), ("02.000", "info", "ended"))
    assert reason(path) == "config_error: too small"
    assert reason(write(run, "gateway-0", "error: gateway: port: no")) == "gateway: port: no"
    assert reason(write(run, "nats", "Traceback", "  File x")) is None
    assert reason(write(run, "nats", "[7] 2026/11/27 15:15:52.4 [FTL] Error listening")) == "Error listening"
    assert reason(run.logs / "none.log") is None


KNOWN = {"X": {"dur"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "C": {"args"}, "M": {"args"}, "i": {"s"}}
KNOWN |= {"s": {"id", "cat"}, "f": {"id", "cat", "bp"}}


def check_trace(traced: Sequence[dict[str, Any]]) -> None:
    """By the Trace Event Format's rules: what each phase needs is there, and nothing is left open."""
    balance: Counter[tuple[str, str]] = Counter()
    ends: dict[int, list[str]] = {}
    named = {each["pid"] for each in traced if each["ph"] == "M" and each["name"] == "process_name"}
    for each in traced:
        assert {"ph", "name", "pid", "tid"} | KNOWN[each["ph"]] <= each.keys(), each
        assert each["pid"] in named
        assert each["ph"] == "M" or each["ts"] >= 0
        if each["ph"] == "X":
            assert each["dur"] > 0
        if each["ph"] in "be":
            balance[(each["id"], each["name"])] += 1 if each["ph"] == "b" else -1
        if each["ph"] in "sf":
            ends.setdefault(each["id"], []).append(each["ph"])
    assert not any(balance.values()) and all(phases == ["s", "f"] for phases in ends.values())


REF = {"request": "req_1", "choice": 0, "attempt": 1}
STORY: list[dict[str, Any]] = [
    {"instance": "gateway-0", "kind": "submit", **REF},
    {"instance": "scheduler-0", "kind": "submitted", "known": False, **REF},
    {"instance": "scheduler-0", "kind": "started", "worker": "worker-0", **REF},
    {
        "instance": "worker-0",
        "kind": "step",
        "step_s": 0.1,
        "prefills": 1,
        "decodes": 2,
        "prefill_tokens": 8,
        "plan": 1,
        "epoch": 1,
        "free_blocks": 7,
    },
    {
        "instance": "scheduler-0",
        "kind": "moved",
        "source": "worker-0",
        "target": "worker-1",
        "mode": "kv",
        "failed": "",
        "moved_bytes": 9,
        "switch_s": 0.01,
        **REF,
    },
    {"instance": "scheduler-0", "kind": "submitted", "known": False, **REF, "attempt": 2},
    {"instance": "scheduler-0", "kind": "started", "worker": "worker-1", **REF, "attempt": 2},
    {"instance": "worker-1", "kind": "found", **REF, "attempt": 2},
    {"instance": "scheduler-0", "kind": "relief", "worker": "worker-1", "chosen": "swap", "offers": []},
    {"instance": "scheduler-0", "kind": "left", **REF, "attempt": 2},
    {
        "instance": "gateway-0",
        "kind": "request",
        "request": "req_1",
        "took_s": 0.5,
        "completion_tokens": 3,
        "status": 200,
    },
]


def told(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"unix_s": 1000.0 + at / 10, **event} for at, event in enumerate(events)]


def test_a_request_that_moved_is_at_both_workers_with_an_arrow_between() -> None:
    traced = chrome_trace(told(STORY))["traceEvents"]
    check_trace(traced)
    stays = [each["name"] for each in traced if each["ph"] == "b"]
    assert stays == ["req_1", "queued", "at worker-0, attempt 1", "queued", "at worker-1, attempt 2"]
    arrow = [each for each in traced if each["ph"] in "sf"]
    assert arrow[0]["pid"] != arrow[1]["pid"]
    assert [each["args"]["value"] for each in traced if each["ph"] == "C"] == [3, 7]


@given(st.lists(st.sampled_from(range(len(STORY))), max_size=len(STORY), unique=True).map(sorted))
def test_whatever_is_forgotten_the_rest_is_a_trace(kept: list[int]) -> None:
    check_trace(chrome_trace(told([STORY[at] for at in kept]))["traceEvents"])


TINY_CHAT = ROOT / "models" / "tiny_chat"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(models.ENV_FOLDER, str(tmp_path / "home"))
    monkeypatch.setenv("KVASIR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "home"


def no_hub(model: HubId, target: Path) -> None:
    (target / "config.json").write_text("{}")
    raise ConfigError(f"{model} cannot be downloaded", param="model")


def test_a_folder_is_pulled_listed_and_removed(home: Path) -> None:
    assert models.known() == []
    found = models.pull(str(TINY_CHAT), None, no_hub)
    assert (found.name, found.problem) == ("tiny_chat", "") and found.size_bytes > 1e6
    models.pull(str(TINY_CHAT), "twin", no_hub)
    assert [each.name for each in models.known()] == ["tiny_chat", "twin"]
    with pytest.raises(ConfigError, match="already"):
        models.pull(str(TINY_CHAT), "twin", no_hub)
    assert models.named("twin") == ("twin", str(home / "twin")) and models.remove("twin").name == "twin"
    assert [each.name for each in models.known()] == ["tiny_chat"]
    with pytest.raises(ConfigError, match="there is tiny_chat"):
        models.remove("twin")
    with pytest.raises(ConfigError, match="stay"):
        models.remove("tiny_chat")


def test_what_is_not_whole_is_not_there(home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({}))
    for source in (str(broken), "somebody/model"):
        with pytest.raises(ConfigError):
            models.pull(source, None, no_hub)
    assert not home.exists() or list(home.iterdir()) == []
    for name in ("", ".", "a/b", "../x"):
        with pytest.raises(ConfigError):
            models.remove(name)


def test_the_hubs_files_are_taken_as_they_come(home: Path) -> None:
    def hub(model: HubId, target: Path) -> None:
        for path in TINY_CHAT.iterdir():
            if path.is_file():
                (target / path.name).write_bytes(path.read_bytes())

    assert models.pull("somebody/model@v1", None, hub).name == "model"
    assert models.named("mine=model") == ("mine", str(home / "model"))
    assert models.named("somebody/other@v2") == ("other", "somebody/other@v2")
    with pytest.raises(ConfigError):
        models.named("mine=")


def test_the_default_model_is_the_file_that_was_fetched(home: Path, tmp_path: Path) -> None:
    assert models.default() is None
    with pytest.raises(ConfigError, match="models pull"):
        models.named(models.DEFAULT)
    file = tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(1000))
    assert models.default() == f"{models.DEFAULT}={file}"
    assert models.named(models.DEFAULT) == (models.DEFAULT, str(file))
    assert [(each.name, each.size_bytes) for each in models.known()] == [(models.DEFAULT, 1000)]
    assert models.pull(models.DEFAULT, None, no_hub).name == models.DEFAULT
    assert models.remove(models.DEFAULT).name == models.DEFAULT
    assert models.default() is None


def test_models_are_pulled_by_name(home: Path) -> None:
    asked: list[str] = []

    def hub(model: HubId, target: Path) -> None:
        asked.append(str(model))
        no_hub(model, target)

    with pytest.raises(ConfigError):
        models.pull("Qwen2.5-0.5B-Instruct", None, hub)
    assert asked == ["Qwen/Qwen2.5-0.5B-Instruct"]


def test_a_file_is_served_under_its_stem_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "Own-1B.Q8_0.gguf"
    file.write_bytes(b"")
    assert models.named(str(file)) == ("Own-1B.Q8_0", str(file))
    assert models.named(f"own={file}") == ("own", str(file))


def test_a_link_keeps_its_own_name(home: Path, tmp_path: Path) -> None:
    """It is served as what the operator called it, not as what it points to."""
    (tmp_path / "mine").symlink_to(TINY_CHAT)
    assert models.named(str(tmp_path / "mine")) == ("mine", str(tmp_path / "mine"))


def test_replays_are_told_in_one_sentence() -> None:
    policy = {"workers": 2, "policy": "ecoserve", "later_s": 1.5}
    worker = {"workers": 3, "policy": "kvasir", "later_s": -0.25}
    told = {"workers": 2, "what_if": [policy, worker], "agreement": {"same_batches": 0.9}}
    said = "it would have ended with ecoserve 1.50 s later, with one more worker 0.25 s earlier"
    assert in_words(told) == f"{said} (the simulator repeats 90% of who ran beside whom)"
