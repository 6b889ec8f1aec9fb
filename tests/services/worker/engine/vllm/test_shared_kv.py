"""KV of a rank in a file that is memory: whoever maps it has the same, also once the file is gone."""

from pathlib import Path

import torch

from services.worker.engine.vllm.steps import KvPart


def test_who_maps_it_has_the_same_memory(tmp_path: Path) -> None:
    part = KvPart(str(tmp_path / "0-0"), (3, 2, 4), torch.bfloat16)
    one, other = part.mapped(), part.mapped()
    (tmp_path / "0-0").unlink()
    kept = torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    alias = kept  # as a layer has it
    kept.set_(one.untyped_storage(), 0, one.shape, one.stride())
    alias[1] = 7.0
    assert torch.equal(other[1], torch.full((2, 4), 7.0, dtype=torch.bfloat16))
    assert not other[0].any() and not other[2].any()
