"""Processes: started for real, signalled for real."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from shared.bus import fenced
from shared.bus.runtime import trim_heap
from shared.errors import NotLeader
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[3]

SERVICE = """
    import asyncio, time
    from shared.bus import Bus, OwnThread, run_main
    from shared.config import ServiceConfig
    from shared.errors import NotLeader, PermissionRefused

    class ToyConfig(ServiceConfig):
        mode: str = "serve"

    async def run(config):
        bus = await Bus.connect(config.bus, service="toy", instance=config.instance)
        try:
            match config.mode:
                case "return":
                    return
                case "typed":
                    raise NotLeader("somebody else is")
                case "refused":
                    raise PermissionRefused("may not publish there")
                case "bug":
                    raise ZeroDivisionError("the cause")
                case "thread":
                    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
                    return
                case "loading":
                    loading = asyncio.get_running_loop().run_in_executor(OwnThread(), time.sleep, 60)
                    print("ready", flush=True)
                    await loading
                case "stubborn":
                    print("ready", flush=True)
                    while True:
                        try:
                            await asyncio.sleep(60)
                        except asyncio.CancelledError:
                            pass
            print("ready", type(asyncio.get_running_loop()).__module__, flush=True)
            await asyncio.sleep(60)
        finally:
            await bus.close()
            print("closed", flush=True)

    import shared.bus.runtime
    shared.bus.runtime._STOP_DEADLINE_S = 0.3
    run_main("toy", ToyConfig, run)
"""


def start(*flags: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVICE), *flags],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_end_on_uvloop(nats_server: NatsServer, number: signal.Signals) -> None:
    process = start(KVASIR_BUS__URL=nats_server.url)
    assert process.stdout is not None and process.stdout.readline() == "ready uvloop\n"
    process.send_signal(number)
    code, out, err = finished(process)
    assert (code, out, err) == (0, "closed\n", "")


@pytest.mark.parametrize(
    ("mode", "code", "said", "unsaid"),
    [
        ("return", 0, "", "error"),
        ("typed", 1, "not_leader: somebody else is", "Traceback"),
        ("refused", 2, "permission_refused: may not publish there", "Traceback"),
        ("bug", 1, "ZeroDivisionError: the cause", "not_leader"),
    ],
)
def test_how_it_ends_by_itself(nats_server: NatsServer, mode: str, code: int, said: str, unsaid: str) -> None:
    ended = finished(start("--mode", mode, "--bus.url", nats_server.url))
    assert ended[:2] == (code, "closed\n") and said in ended[2] and unsaid not in ended[2]


def test_what_does_not_stop_is_given_up(nats_server: NatsServer) -> None:
    process = start("--mode", "stubborn", "--bus.url", nats_server.url)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    process.terminate()
    code, _, err = finished(process)
    assert code == 1 and "did not end within 0.3 s" in err


def test_a_busy_thread_does_not_keep_the_process(nats_server: NatsServer) -> None:
    code, _, err = finished(start("--mode", "thread", "--bus.url", nats_server.url))
    assert code == 1 and "did not end within 0.3 s" in err


def test_a_cancelled_call_on_its_own_thread_does_not_keep_the_process(nats_server: NatsServer) -> None:
    process = start("--mode", "loading", "--bus.url", nats_server.url)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert finished(process) == (0, "closed\n", "")


def test_a_setting_that_cannot_work_is_one_line_and_exit_code_2(nats_server: NatsServer) -> None:
    code, out, err = finished(start("--bus.connect_timeout_s", "soon"))
    assert (code, out) == (2, "")
    assert err.startswith("error: toy: bus.connect_timeout_s: ") and err.count("\n") == 1


def test_no_server_is_one_line_and_exit_code_1() -> None:
    code, _, err = finished(start("--bus.url", "nats://127.0.0.1:1", "--bus.connect_timeout_s", "0.2"))
    assert code == 1
    assert "bus_unavailable: no NATS connection to nats://127.0.0.1:1" in err and "Traceback" not in err


def test_a_turn_that_raises_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    """Keeps one value that nobody thought of from ending a loop that serves everybody."""
    turns = []
    for number in range(3):
        with fenced("toy loop"):
            turns.append(number)
            raise ZeroDivisionError if number else NotLeader("somebody else is")
    assert turns == [0, 1, 2] and [bool(record.exc_info) for record in caplog.records] == [False, True, True]
    with pytest.raises(asyncio.CancelledError), fenced("toy loop"):
        raise asyncio.CancelledError


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc")
def test_what_was_freed_between_what_is_held_goes_back() -> None:
    process = psutil.Process()
    held = [bytes(1000) for _ in range(100_000)]
    kept = held[::200]
    del held
    before = process.memory_info().rss
    trim_heap()
    assert before - process.memory_info().rss > 5e7 and len(kept) == 500


_IN_A_THREAD = """
import threading, psutil
from shared.bus.runtime import share_heap, trim_heap

def work():
    bytearray(30 << 20)  # After it, those that are no larger come from the heap.
    bytearray(20 << 20)
    freed.set()
    is_over.wait()

share_heap()
freed, is_over, this = threading.Event(), threading.Event(), psutil.Process()
before = this.memory_info().rss
threading.Thread(target=work).start()
freed.wait()
trim_heap()
print(this.memory_info().rss - before)
is_over.set()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc")
def test_what_a_thread_freed_at_the_end_of_its_heap_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_A_THREAD], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2e6
