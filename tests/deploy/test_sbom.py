"""The bill of materials has everything that is pinned, with the hashes that are checked, nothing twice."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def made(folder: Path) -> dict[str, object]:
    out = folder / "sbom.json"
    subprocess.run([sys.executable, str(ROOT / "deploy" / "sbom.py"), str(out)], check=True)
    document: dict[str, object] = json.loads(out.read_text())
    return document


def test_it_has_what_the_locks_have(tmp_path: Path) -> None:
    document = made(tmp_path)
    assert document["bomFormat"] == "CycloneDX" and document == made(tmp_path), "the same each time"
    parts = document["components"]
    assert isinstance(parts, list)
    refs = [part["bom-ref"] for part in parts]
    assert len(set(refs)) == len(refs)
    for lock in (ROOT / "deploy" / "locks").glob("*.txt"):
        lines = lock.read_text().splitlines()
        pins = [line.split()[0].split(";")[0] for line in lines if "==" in line and line[0].isalnum()]
        own = [part for part in parts if {"name": "kvasir:set", "value": lock.stem} in part["properties"]]
        assert len(own) == len(pins) > 0, lock.name
        hashes = {line.strip().removesuffix("\\").strip() for line in lines if "--hash=" in line}
        listed = {f"--hash=sha256:{one['content']}" for part in own for one in part["hashes"]}
        assert hashes <= listed, lock.name
    assert any(part["name"] == "uvicorn" and part["hashes"] for part in parts)
