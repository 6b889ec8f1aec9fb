"""The run directory; settings that are looked at before the first process; and what is in the way."""

import asyncio
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stack import obstructions
from services.stack.cli import main
from services.stack.down import end_leftovers
from services.stack.down import is_alive as alive
from services.stack.obstructions import (
    Obstructed,
    check_settings,
    choose_nats_port,
    choose_port,
    running_already,
)
from services.stack.process import ChildProcess
from services.stack.rundir import RunDirectory
from services.stack.supervisor import ChildSpec
from shared.errors import ConfigError
from shared.subjects import OPERATOR
from tests.patience import PATIENCE_S
from tests.services.stack.standin import PARENT, PYTHON


def made(path: Path) -> RunDirectory:
    run = RunDirectory(path / "run")
    run.create()
    return run


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = made(tmp_path), made(tmp_path)
    assert second.holder() is None and first.acquire()
    assert not second.acquire() and second.holder() == os.getpid()
    first.release()
    assert second.holder() is None and second.acquire()
    second.release()


def test_credentials_are_made_once_and_private(tmp_path: Path) -> None:
    run = made(tmp_path)
    first = run.credentials("worker-0", "worker-1")
    assert first == made(tmp_path).credentials() and first.api_key.startswith("sk-")
    assert set(first.nats_passwords) == {OPERATOR, "worker-0", "worker-1"}
    assert len(set(first.nats_passwords.values())) == 3
    assert all(p[0].isalpha() and p.isalnum() and len(p) > 40 for p in first.nats_passwords.values())
    assert len(first.api_key_sha256) == 64 and first.api_key not in first.api_key_sha256
    for path in (run.path / "credentials.json", run.path):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("damage", ['{"api_key": 1', '{"nats_passwords": {}}', "[]", ""])
def test_credentials_that_cannot_be_read_are_refused_and_left(tmp_path: Path, damage: str) -> None:
    """A new key was made in silence: every client got a 401."""
    run = made(tmp_path)
    run.credentials_file.write_text(damage)
    with pytest.raises(ConfigError, match="move it away"):
        run.credentials("worker-0")
    assert run.credentials_file.read_text() == damage


def test_deleted_files_are_written_again(tmp_path: Path) -> None:
    run, copies = made(tmp_path), dict[Path, str]()
    before = run.credentials("worker-0")
    run.nats_config().write_text("x")
    assert run.acquire() and run.restore(copies) == []
    for name in ("credentials.json", "nats.conf", "lock"):
        (run.path / name).unlink()
    assert sorted(run.restore(copies)) == ["credentials.json", "nats.conf"]
    assert run.credentials() == before and run.nats_config().read_text() == "x"
    assert stat.S_IMODE(run.nats_config().stat().st_mode) == 0o600
    assert run.acquire() and run.acquire()
    assert made(tmp_path).holder() == os.getpid()


def test_little_room_is_a_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path)
    for total, free, text in (
        (10**12, 6 * 10**10, ""),
        (10**12, 4 * 10**10, "40000 MB"),
        (10**9, 10**8, "100 MB"),
    ):
        usage = shutil._ntuple_diskusage(total, total - free, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert text in run.low_disk() and bool(text) == bool(run.low_disk())


def test_what_is_missing_is_completed_and_a_damaged_state_is_none(tmp_path: Path) -> None:
    run = made(tmp_path)
    (run.path / "credentials.json").write_text(
        json.dumps({"api_key": "sk-kept", "nats_passwords": {"worker-7": "kept", "worker": "gone"}})
    )
    completed = run.credentials("ledger-0")
    assert completed.api_key == "sk-kept" and completed.nats_passwords["worker-7"] == "kept"
    assert set(completed.nats_passwords) == {OPERATOR, "worker-7", "ledger-0"}
    assert completed == run.credentials()
    run.state_file.write_text("[1]")
    assert run.read_state() == {}
    run.write_state({"pid": 7})
    assert run.read_state() == {"pid": 7} and not list(run.path.glob("*.tmp"))


def test_logs_rotate_and_the_oldest_goes(tmp_path: Path) -> None:
    run = made(tmp_path)
    for number in range(6):
        (run.logs / "a.log").write_text(str(number))
        run.rotate_logs()
    found = {path.name: path.read_text() for path in run.logs.iterdir()}
    assert found == {"a.log.1": "5", "a.log.2": "4", "a.log.3": "3"}


def test_long_logs_are_trimmed_under_their_writer(tmp_path: Path) -> None:
    run = made(tmp_path)
    with (run.logs / "a.log").open("a") as writer:
        writer.write("x" * 200)
        writer.flush()
        (run.logs / "b.log").write_text("short")
        run.trim_logs(most_bytes=600)
        writer.write("more")
    assert (run.logs / "a.log").read_text() == "more" and (run.logs / "a.log.1").read_text() == "x" * 200
    assert (run.logs / "b.log").read_text() == "short"


@given(rounds=st.lists(st.lists(st.integers(0, 400), min_size=3, max_size=3), min_size=1, max_size=8))
def test_logs_never_exceed_their_bound_and_the_latest_lines_stay(rounds: list[list[int]]) -> None:
    """They were trimmed to 64 MiB each, with older parts that nothing bounded."""
    with TemporaryDirectory() as folder:
        run = made(Path(folder))
        for number, sizes in enumerate(rounds):
            for name, size in zip("abc", sizes, strict=True):
                with (run.logs / f"{name}.log").open("a") as file:
                    file.write("x" * size)
            if number % 3 == 2:
                run.rotate_logs()
            run.trim_logs(most_bytes=1000)
            found = {path.name: path.stat().st_size for path in run.logs.iterdir()}
            assert sum(found.values()) <= 1000
            assert all(found[f"{name}.log"] <= 111 for name in "abc" if f"{name}.log" in found)


async def test_ends_groups_and_spares_who_has_the_pid_now(tmp_path: Path) -> None:
    left = ChildProcess.start((*PYTHON, PARENT), os.environ, tmp_path, tmp_path / "log")
    other = ChildProcess.start(("sleep", "1000"), os.environ, tmp_path, tmp_path / "log")
    now_s = time.time()
    async with asyncio.timeout(PATIENCE_S):
        while not psutil.Process(left.pid).children():
            await asyncio.sleep(0.01)
    state = {
        "children": [
            {"pid": left.pid, "started_unix_s": now_s},
            {"pid": other.pid, "started_unix_s": now_s - 1000.0},
            {"pid": None, "started_unix_s": now_s},
        ]
    }
    assert end_leftovers(state) == 2, "the child and its own child"
    assert alive(other.pid) and not alive(left.pid)
    other.kill()
    await asyncio.gather(left.wait(), other.wait())
    assert end_leftovers(state) == 0 and end_leftovers({}) == 0


ROOT = Path(__file__).parents[3]


def child(instance: str, **settings: str) -> ChildSpec:
    service = instance.rpartition("-")[0]
    env = {f"KVASIR_{service.upper()}__{name.upper()}": value for name, value in settings.items()}
    return ChildSpec(instance, ("python", "-m", f"services.{service}", "--instance", instance), env)


def test_what_is_right_passes_and_what_is_no_service_is_left_alone() -> None:
    names = ("gateway-0", "scheduler-0", "predictor-0", "placement-0", "ledger-0", "worker-0")
    check_settings([ChildSpec("nats", ("nats-server",), {}), *map(child, names)], ROOT)


def test_everything_that_is_wrong_is_told_at_once() -> None:
    specs = [
        child("scheduler-0", policy="nope"),
        child("placement-0", order="nope", policy="nope"),
        child("predictor-0", model="nope"),
        child("worker-0", kv_blocks="-1"),
        child("worker-1", device="toaster"),
    ]
    with pytest.raises(ConfigError) as raised:
        check_settings(specs, ROOT)
    lines = raised.value.message.split("\nerror: ")
    starts = ["scheduler-0: batching policy 'nope'", "placement-0: order", "predictor-0: length model 'nope'"]
    starts += ["worker-0: kv_blocks", "worker-1: device"]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 5


def test_what_several_share_is_told_once() -> None:
    shared = [child("gateway-0", model="models/nope"), child("worker-0", model="models/nope")]
    with pytest.raises(ConfigError) as raised:
        check_settings(shared, ROOT)
    first = raised.value.message.partition("\n")[0]
    assert first == "model 'models/nope': no such folder; models has tiny_chat"
    with pytest.raises(ConfigError, match=r"^worker: kv_blocks"):
        check_settings([child("worker-0", kv_blocks="-1"), child("worker-1", kv_blocks="-1")], ROOT)


def test_up_starts_no_process_where_a_setting_is_wrong(
    tmp_path: Path, free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    whole = ROOT / "models" / "tiny_chat"
    for file in whole.glob("*.json"):
        (cut / file.name).write_bytes(file.read_bytes())
    (cut / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:100_000])
    words = ["up", "--run-dir", str(tmp_path / "run"), "--port", str(free_port), "--nats-port", "0"]
    began_s = time.monotonic()
    assert main([*words, "--model", str(cut)]) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"error: worker: {cut}/model.safetensors is cut short, 100,000 of 12,")
    assert len(err.splitlines()) == 1 and "starting" not in out
    assert not list((tmp_path / "run" / "logs").iterdir()) and time.monotonic() - began_s < 30


def test_a_disk_tier_that_was_asked_for_can_be_opened(tmp_path: Path) -> None:
    """Before anything starts; a worker that is restarted later goes on without it, and says so."""
    (tmp_path / "file").touch()
    tier = {"prefix_cache__disk_mb": "8", "prefix_cache__disk_path": str(tmp_path / "file")}
    with pytest.raises(ConfigError, match=r"worker-0: the disk tier .*disk_path, or leave out disk_mb"):
        check_settings([child("worker-0", **tier)], ROOT)
    there = {**tier, "prefix_cache__disk_path": str(tmp_path / "there")}
    check_settings([child("worker-0", **there)], ROOT)
    assert not list((tmp_path / "there").iterdir()), "it only looks"
    with pytest.raises(ConfigError, match=r"has room for \d+ MB of 999999999"):
        check_settings([child("worker-0", **{**there, "prefix_cache__disk_mb": "999999999"})], ROOT)


@pytest.mark.parametrize(("cuda", "is_refused"), [("None", True), ("'12.8'", False)])
def test_a_gpu_needs_a_torch_that_was_built_for_it(
    cuda: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    version = f"__version__ = '2.13.0+cpu'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (tmp_path / "torch" / "version.py").write_text(version)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    said: AbstractContextManager[object] = nullcontext()
    if is_refused:
        said = pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu is built without CUDA.*TORCH=cuda")
    with said:
        check_settings([child("worker-0", device="cuda")], ROOT)


def test_a_broken_chat_template_is_found_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "broken"
    shutil.copytree(ROOT / "models" / "tiny_chat", model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content")
    with pytest.raises(ConfigError, match=r"the chat template of .*/broken cannot be used: .*line 2"):
        check_settings([child("gateway-0", model=str(model))], ROOT)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_taken_ports_are_refused_with_the_way_out(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstructions, "_PATIENCE_S", 0.1)
    with pytest.raises(
        Obstructed, match=rf"port {taken_port}.*pid {os.getpid()}[\s\S]*kill {os.getpid()}.*--port N"
    ):
        choose_port(taken_port)
    with pytest.raises(Obstructed, match="--nats-port N"):
        choose_nats_port(taken_port, print)


def test_nats_moves_aside_unless_told_where_to_be(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(obstructions, "DEFAULT_NATS_PORT", taken_port)
    chosen = choose_nats_port(None, said.append)
    assert chosen not in (0, taken_port) and f"NATS goes to {chosen}" in said[0]


def test_two_stacks_that_start_at_once_do_not_choose_the_same_port_for_nats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing listens on it yet: the first one has only chosen it."""
    port = obstructions.free_port()
    monkeypatch.setattr(obstructions, "DEFAULT_NATS_PORT", port)
    code = (
        "import sys; from services.stack import obstructions; "
        f"obstructions.DEFAULT_NATS_PORT = {port}; "
        "print(obstructions.choose_nats_port(None, print), flush=True); sys.stdin.read()"
    )
    said: list[str] = []
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as first:
        assert first.stdout is not None and first.stdout.readline() == f"{port}\n"
        assert choose_nats_port(None, said.append) != port and "taken by another stack" in said[0]
        first.communicate(timeout=PATIENCE_S)
    assert choose_nats_port(None, said.append) == port == choose_nats_port(None, said.append)


def test_a_second_start_is_told_how_to_stop_the_first(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    assert run.acquire()
    run.write_state({"pid": os.getpid(), "url": "http://127.0.0.1:1"})
    message = running_already(RunDirectory(tmp_path)).message
    run.release()
    assert f"pid {os.getpid()} on http://127.0.0.1:1" in message
    assert f"kvasir down --run-dir {tmp_path}" in message


def test_a_taken_port_is_not_free_and_its_owner_is_named() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert not obstructions.is_free(port)
        pid, name = obstructions.owner(port)
        assert pid == os.getpid() and f"pid {os.getpid()} (" in name
    assert obstructions.is_free(port) and obstructions.owner(port)[0] is None


def test_a_port_that_was_asked_for_and_is_not_listened_on_yet_is_given_to_nobody_else() -> None:
    """A gateway answered its clients as its operator: both listeners had been bound to one port."""
    asked = obstructions.free_port()
    every = {asked - 1 + step for step in range(3)}
    for _ in range(300):
        assert obstructions.choose_port(0, taken=every) not in every
