"""A checkpoint's digest: the same for whoever computes it, another for anything that changes an answer."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.checkpoint import checkpoint_digest, stored_dtype
from tests.stack.running import TINY_CHAT

FP32 = "torch.float32"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(TINY_CHAT, copy)
    return copy


def config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_files_may_be_cut_and_written_otherwise(folder: Path) -> None:
    held = checkpoint_digest(str(folder), FP32)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    config(folder, transformers_version="0.0", dtype="float64", _name_or_path="elsewhere")
    assert checkpoint_digest(str(folder), FP32) == held


def test_another_weight_configuration_or_dtype_is_another(folder: Path) -> None:
    seen = {checkpoint_digest(str(folder), FP32), checkpoint_digest(str(folder), "torch.bfloat16")}
    config(folder, rms_norm_eps=1e-6)
    seen.add(checkpoint_digest(str(folder), FP32))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    tensors[first].view(-1)[0] += torch.ones((), dtype=tensors[first].dtype)
    save_file(tensors, path)
    seen.add(checkpoint_digest(str(folder), FP32))
    path.unlink()
    for old in (b"one", b"two"):
        (folder / "pytorch_model.bin").write_bytes(old)
        seen.add(checkpoint_digest(str(folder), FP32))
    assert len(seen) == 6


def test_the_dtype_that_it_was_made_in(folder: Path) -> None:
    assert stored_dtype(str(folder)) == "bfloat16"
    config(folder, dtype=None, text_config={"torch_dtype": "float16"})
    assert stored_dtype(str(folder)) == "float16"
    config(folder, text_config={})
    assert stored_dtype(str(folder)) == "float32"
