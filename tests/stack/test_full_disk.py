"""The disk of the run directory is full, and files in it are deleted: the stack serves on, and says so."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
_FULL_S = 20.0
_DISK_MB = 140


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    """To the last byte, and again when something was freed."""
    with contextlib.suppress(OSError), (disk / "fill").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def chat(stack: RunningStack, text: str) -> int:
    headers, body = {"Authorization": f"Bearer {stack.key}"}, {"prompt": text, "max_tokens": 3}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=30, trust_env=False) as client:
        answer = await client.post("/v1/completions", json=body | {"model": stack.model.name})
    return answer.status_code


async def test_a_full_disk_stops_nothing_and_is_a_trouble(small_disk: Path) -> None:
    """nats-server gave its leases up, and no scheduler led until it was started anew."""
    settings = (
        f"gateway.stored_responses={small_disk / 'responses.db'}",
        "worker.prefix_cache.disk_mb=16",
        f"worker.prefix_cache.disk_path={small_disk}",
    )
    with running_stack(small_disk / "run", settings=settings) as stack:
        key = stack.key
        assert await chat(stack, "Before") == 200
        began_s = time.monotonic()
        codes: list[int] = []
        while time.monotonic() - began_s < _FULL_S:
            fill(small_disk)
            codes.append(await chat(stack, f"Once, {len(codes)} times"))
            await asyncio.sleep(0.5)
        said = await asyncio.to_thread(stack.status)
        assert any("MB left" in trouble for trouble in said["troubles"])
        stack.signal("worker-0", signal.SIGKILL)
        stack.signal("nats", signal.SIGKILL)
        codes.append(await chat(stack, "A worker and the bus die beside it"))
        assert set(codes) == {200} and len(codes) > 5
        (small_disk / "fill").unlink()
        for name in ("worker-0", "nats"):
            await asyncio.to_thread(stack.until_restarted, name, restarts=1)
        assert await chat(stack, "After") == 200 and stack.key == key


async def test_files_that_are_deleted_come_back(tmp_path: Path) -> None:
    """`status` and `down` said that nothing runs, and a nats-server that died never came back."""
    with running_stack(tmp_path / "run") as stack:
        run, key = stack.run_dir, stack.key
        pid = stack.status()["stack"]["pid"]
        for path in run.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        while not (run / "state.json").exists():
            await asyncio.sleep(0.1)
        said = await asyncio.to_thread(stack.command, "status")
        assert said.stdout.startswith("well: ") and "running: " not in said.stdout
        for name in ("nats", "worker-0"):
            stack.signal(name, signal.SIGKILL)
        assert await chat(stack, "Once") == 200
        for name in ("nats", "worker-0"):
            await asyncio.to_thread(stack.until_restarted, name, restarts=1)
        assert await chat(stack, "Again") == 200
        assert stack.key == key and (run / "logs" / "nats.log").exists()
        ends_s = time.monotonic() + STACK_PATIENCE_S
        while not (run / "seed.sock").exists():
            assert time.monotonic() < ends_s, "a seed without its socket is replaced"
            await asyncio.sleep(0.2)
        assert stack.status()["stack"]["pid"] == pid
    assert "nothing runs" in stack.command("status").stdout
