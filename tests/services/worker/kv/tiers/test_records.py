"""A block comes back from its record as it was; the right bytes of another block or model do not pass."""

import numpy as np
import pytest
import torch

from services.worker.kv.tiers.records import Records, checksum


def pools(
    dtype: torch.dtype, device: str = "cpu", blocks: int = 6
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two layers of different shape, filled at random."""
    shapes = (((blocks, 2, 4, 8), (blocks, 2, 8, 3)), ((blocks, 1, 6, 8), (blocks, 1, 8, 6)))
    return [
        (torch.randn(key).to(device, dtype), torch.randn(value).to(device, dtype)) for key, value in shapes
    ]


def round_trip(made: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Blocks 1, 4, 2 to records and into blocks 5, 0, 3; the others stay."""
    before = [(key.clone(), value.clone()) for key, value in made]
    records = Records(made)
    rows = np.zeros((3, records.record_bytes), dtype=np.uint8)
    records.read([1, 4, 2], list(rows))
    records.write(list(rows), [5, 0, 3])
    for layer, old in zip(made, before, strict=True):
        for pool, was in zip(layer, old, strict=True):
            assert torch.equal(pool, was[[4, 1, 2, 2, 4, 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_as_they_were(dtype: torch.dtype) -> None:
    round_trip(pools(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_to_a_gpu_as_they_were(dtype: torch.dtype) -> None:
    round_trip(pools(dtype, "cuda"))


def test_a_record_is_as_long_as_a_block_over_all_layers() -> None:
    made = pools(torch.bfloat16)
    assert Records(made).record_bytes == sum(pool[0].numel() * 2 for layer in made for pool in layer)


def test_pools_that_cannot_be_taken_as_rows_are_refused() -> None:
    key, value = torch.zeros(4, 1, 8, 2), torch.zeros(4, 1, 2, 8)
    with pytest.raises(ValueError, match="contiguous"):
        Records([(key.transpose(2, 3), value)])
    with pytest.raises(ValueError, match="number of blocks"):
        Records([(key, value[:3])])


ROW = np.arange(256, dtype=np.uint8)


def test_it_depends_on_bytes_name_and_fingerprint() -> None:
    sums = {
        checksum(ROW, b"name", b"model"),
        checksum(ROW, b"eman", b"model"),
        checksum(ROW, b"name", b"other"),
        checksum(ROW[::-1].copy(), b"name", b"model"),
    }
    assert len(sums) == 4
    assert checksum(ROW.copy(), b"name", b"model") in sums
