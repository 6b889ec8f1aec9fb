"""Compiles this folder's C++ to one shared library, once per source, compiler and CPU.

`python -m services.worker.engine.native.build` builds it at setup; a worker without a library builds it at
start. Concurrent builds use separate folders; the first one to finish is renamed into place."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from shared.errors import ConfigError

SOURCES = Path(__file__).parent
BUILDS = SOURCES.parents[3] / "build" / "native"
LIBRARY = "libkvasir_native.so"
_NOTE = "made_for"
"""File beside a library with the digest of its sources and CPU, without the compiler."""
FLAGS = (
    "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -fPIC -Wno-psabi -fvisibility=hidden"
).split()
"""No -ffast-math, because −inf is the score of keys that a query does not see."""
_OPENMP = "-fopenmp"
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_DEADLINE_S = 300.0


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: CXX of the environment, or the first of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else _COMPILERS
    return next((path for path in map(shutil.which, names) if path), None)


def build(folder: Path = BUILDS) -> Path:
    """Return the path of the library, compiled if necessary.

    Raises ConfigError if there is neither compiler nor library, or with the compiler's error."""
    compiler = find_compiler()
    if compiler is None:
        if made := _made_elsewhere(folder):
            return made
        raise ConfigError(f"no C++ compiler: install one of {', '.join(_COMPILERS)}, or name one in CXX")
    home = folder / _digest(compiler)
    if not (home / LIBRARY).exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
                _compile(compiler, Path(scratch) / "out")
                try:
                    (Path(scratch) / "out").rename(home)
                except OSError:
                    if not (home / LIBRARY).exists():  # else another process was first
                        raise
        except OSError as error:
            raise ConfigError(f"the native library cannot be written below {folder}: {error}") from error
    return home / LIBRARY


def _made_elsewhere(folder: Path) -> Path | None:
    """Return a library of the same sources and CPU by any compiler, as in a container image, or None."""
    notes = (note for note in sorted(folder.glob(f"*/{_NOTE}")) if note.read_text() == _digest())
    return next((note.parent / LIBRARY for note in notes), None)


def _compile(compiler: str, out: Path) -> None:
    out.mkdir()
    flags = [*FLAGS, _OPENMP] if _has_openmp(compiler, out) else [*FLAGS]
    objects = {source: out / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
    _run_all([[compiler, *flags, "-c", str(source), "-o", str(made)] for source, made in objects.items()])
    _run_all([[compiler, *flags, "-shared", *map(str, objects.values()), "-o", str(out / LIBRARY)]])
    for made in objects.values():
        made.unlink()
    (out / _NOTE).write_text(_digest())


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run commands in parallel. Raises ConfigError with the error of the first failing one."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        for command, process in zip(commands, running, strict=True):
            _, said = process.communicate(timeout=_COMPILE_DEADLINE_S)
            if process.returncode:
                raise ConfigError(f"{' '.join(command)} failed: {said.strip()[-2000:]}")
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the compiler was not done after {_COMPILE_DEADLINE_S:.0f} s") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _has_openmp(compiler: str, folder: Path) -> bool:
    probe, made = folder / "probe.cc", folder / "probe.so"
    probe.write_text("#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n")
    try:
        _run_all([[compiler, _OPENMP, "-fPIC", "-shared", str(probe), "-o", str(made)]])
    except ConfigError:
        return False
    finally:
        probe.unlink()
        made.unlink(missing_ok=True)
    return True


def _digest(compiler: str | None = None) -> str:
    """Return a digest of everything that the library depends on, with the compiler if it is given."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    made_by = () if compiler is None else (compiler, _version(compiler))
    for part in (*FLAGS, _OPENMP, *made_by, _cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{compiler} --version failed: {error}") from error
    return done.stdout


def _cpu() -> str:
    """Return CPU model and instruction sets, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(named)}))


if __name__ == "__main__":
    try:
        print(build())
    except ConfigError as error:
        sys.exit(f"native library not built, plain torch is used instead: {error.message}")
