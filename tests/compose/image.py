"""What is in the image: the locked packages and no others, no secret, nothing that makes anybody root,
nothing that Debian mended since, and, where a scanner is on the path, nothing with a known flaw that is
mended elsewhere.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.compose.containers import IMAGE, docker
from tests.stack.running import ROOT

_LOCKS = ("runtime.txt", "torch-cpu.txt")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)", re.MULTILINE)
_OF_VENV = {"pip", "setuptools"}
"""Come with the base's venv module."""
_LIST = (
    "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
)
_SECRETS = (
    "grep -rlE -- '-----BEGIN [A-Z ]*PRIVATE KEY-----|sk-[A-Za-z0-9_-]{30,}' /srv /data /etc /root || true"
)
_ROOT_MAKERS = "find / -xdev -type f -perm /6000 2>/dev/null || true"
_UPDATES = """
. /etc/os-release
rm -rf /etc/apt/sources.list.d /etc/apt/sources.list
for suite in "debian $VERSION_CODENAME" "debian-security $VERSION_CODENAME-security"; do
  echo "deb http://deb.debian.org/$suite main" >> /etc/apt/sources.list
done
apt-get -qq -o Acquire::Retries=2 -o APT::Update::Error-Mode=any update && apt-get -qq --simulate dist-upgrade
"""
"""What Debian's archive has newer, as apt would install it; nothing is."""
_UPDATE = re.compile(r"^Inst (\S+) \[([^]]+)\] \((\S+) ([^)]*)\)", re.MULTILINE)
SCANNERS: Mapping[str, tuple[str, ...]] = {
    "trivy": (
        "image",
        "--quiet",
        "--ignore-unfixed",
        "--severity",
        "HIGH,CRITICAL",
        "--exit-code",
        "1",
        IMAGE,
    ),
    "grype": ("--quiet", "--only-fixed", "--fail-on", "high", f"docker:{IMAGE}"),
}
_SCAN_S = 900
"""It may fetch its list of flaws first."""


def plain(name: str) -> str:
    """As packages are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(locks: Path = ROOT / "deploy" / "locks") -> dict[str, str]:
    """Version by name, of what the image is made of."""
    pins = (pin for lock in _LOCKS for pin in _PIN.findall((locks / lock).read_text()))
    return {plain(name): version for name, version in pins}


def unlocked(installed: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """What is installed and not locked, or in another version than that."""
    found = {plain(name): version for name, version in installed.items()}
    others = {n: version for n, version in found.items() if n not in _OF_VENV and pins.get(n) != version}
    return sorted(f"{name} {version}" for name, version in others.items())


def check_image() -> list[str]:
    """What was found well, in sentences. Raises AssertionError, or CalledProcessError where a scanner finds
    something."""
    installed: dict[str, str] = json.loads(_inside("/opt/kvasir/bin/python", "-c", _LIST))
    assert unlocked(installed, locked()) == []
    environment = docker("image", "inspect", "--format", "{{json .Config.Env}}", IMAGE)
    assert not re.search("PASSWORD|SECRET|_KEY", environment), environment
    assert _inside("sh", "-c", _SECRETS).split() == [] and _inside("sh", "-c", _ROOT_MAKERS).split() == []
    return [f"{len(installed)} packages, all locked; no secret, no setuid file", _updated(), _scanned()]


def security_updates(simulated: str) -> list[str]:
    """What is older in the image than in Debian's security archive, from what `apt-get --simulate` printed:
    "Inst NAME [OLD] (NEW ARCHIVES...)"."""
    return sorted(
        f"{name} {old}, mended in {new}"
        for name, old, new, archives in _UPDATE.findall(simulated)
        if "-Security:" in archives or "-security" in archives
    )


def _updated() -> str:
    """Whether Debian mended something that the image has. Raises AssertionError: take a newer base."""
    try:
        simulated = docker("run", "--rm", "--network", "host", "--user", "0", IMAGE, "sh", "-c", _UPDATES)
    except subprocess.CalledProcessError:
        return "not compared with Debian's security archive: it cannot be reached"
    waiting = security_updates(simulated)
    assert not waiting, f"the base is behind Debian's security archive, take a newer one (BASE=): {waiting}"
    return "Debian's security archive has nothing newer"


def _scanned() -> str:
    """By the first scanner that there is."""
    for name, words in SCANNERS.items():
        if shutil.which(name):
            subprocess.run((name, *words), check=True, timeout=_SCAN_S)
            return f"{name} knows no flaw of it that is mended elsewhere"
    return f"not scanned for known flaws: none of {', '.join(SCANNERS)} is on the path"


def _inside(*words: str) -> str:
    """What a command prints in a container that sees no network."""
    return docker("run", "--rm", "--network", "none", "--user", "0", IMAGE, *words)
