"""`python deploy/sbom.py [FILE]`: a software bill of materials, in CycloneDX's JSON, of what set-up installs.

Everything in it comes from the lock files of `deploy/locks`, which pin names, versions and hashes. Standard
library only, as what it describes need not be installed.
"""

import json
import re
import sys
from pathlib import Path

LOCKS = Path(__file__).resolve().parent / "locks"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def components(locks: Path = LOCKS) -> list[dict[str, object]]:
    """Each pinned package once for each version, with the sets that it is in, in order of names."""
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for lock in sorted(locks.glob("*.txt")):
        key: tuple[str, str] | None = None
        for line in lock.read_text().splitlines():
            if pin := _PIN.match(line):
                key = (re.sub(r"[-_.]+", "-", pin[1]).lower(), pin[2])
                found.setdefault(key, (set(), set()))[0].add(lock.stem)
            if key is not None:
                found[key][1].update(_HASH.findall(line))
    return [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version.replace('+', '%2B')}",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "hashes": [{"alg": "SHA-256", "content": each} for each in sorted(hashes)],
            "properties": [{"name": "kvasir:set", "value": each} for each in sorted(sets)],
        }
        for (name, version), (sets, hashes) in sorted(found.items())
    ]


def document(locks: Path = LOCKS) -> dict[str, object]:
    """The whole: the same for the same lock files."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "kvasir", "bom-ref": "kvasir"}},
        "components": components(locks),
    }


def main(words: list[str]) -> None:
    text = json.dumps(document(), indent=1) + "\n"
    if words:
        Path(words[0]).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
