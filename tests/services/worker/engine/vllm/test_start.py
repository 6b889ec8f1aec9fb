"""What is looked at when a worker starts vLLM; what is not as expected is refused in a sentence."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from services.worker.engine.vllm.runner import check_device
from services.worker.engine.vllm.seam import require
from services.worker.engine.vllm.steps import KvPart, as_it_lies, check_groups, require_fields, require_names
from shared.errors import ConfigError

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}


def layer_of(layout: str) -> torch.Tensor:
    """Layer 1 of a KV that lies in this order, told as vLLM tells it: blocks, heads, tokens, content."""
    whole = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * CONTENT).view(*(SIZES[axis] for axis in layout))
    return whole.permute(*(layout.index(axis) for axis in "LBHNC"))[1]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_a_block_is_one_piece_of_memory(layout: str) -> None:
    """LBHNC is what vLLM has on a CPU, LBNHC what it has on most GPUs."""
    told = layer_of(layout)
    kv = as_it_lies(told)
    assert kv.is_contiguous() and kv.data_ptr() == told.data_ptr()
    for block in range(BLOCKS):
        piece = kv[block].flatten()
        assert torch.equal(piece, torch.arange(int(piece[0]), int(piece[0]) + HEADS * TOKENS * CONTENT))
        assert set(piece.tolist()) == set(told[block].flatten().tolist())


@pytest.mark.parametrize("layout", ["LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_in_several_pieces_are_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match="set VLLM_KV_CACHE_LAYOUT=LBNHC"):
        as_it_lies(layer_of(layout))


def test_keys_apart_from_values_are_refused() -> None:
    """As older backends had them: `[2, blocks, ...]`, told with the blocks first."""
    with pytest.raises(ConfigError, match="does not lie block behind block"):
        as_it_lies(torch.zeros(2, BLOCKS, TOKENS, HEADS).transpose(0, 1))


def test_devices_and_ranks_that_cannot_be() -> None:
    check_device("cpu", "cpu", 2)
    check_device("cuda", "cuda:1", 1)
    with pytest.raises(ConfigError, match=r"built for cpu: set worker\.device cpu"):
        check_device("cpu", "cuda", 1)
    with pytest.raises(ConfigError, match=r"on a CPU only: set vllm\.tensor_parallel 1"):
        check_device("cuda", "cuda", 2)


class FullAttentionSpec:
    """By its name alone."""


class MambaSpec:
    """By its name alone."""


def test_a_model_of_several_tables_is_refused() -> None:
    attention, mamba = (SimpleNamespace(kv_cache_spec=kind()) for kind in (FullAttentionSpec, MambaSpec))
    check_groups([attention])
    for groups in ([attention, attention], [mamba], []):
        with pytest.raises(ConfigError, match="one table of blocks for a sequence"):
            check_groups(groups)


@dataclass
class Told:
    """As vLLM's own are."""

    req_id: str
    block_ids: list[int]


class Kept(NamedTuple):
    """The same as a tuple."""

    req_id: str


def test_what_is_private_and_gone_is_named() -> None:
    module = SimpleNamespace(Told=Told, Kept=Kept)
    require_fields(module, "Told", "req_id block_ids")
    require_fields(module, "Kept", "req_id")
    require_names(SimpleNamespace(sampler=None), ("sampler",))
    with pytest.raises(ConfigError, match=r"found: no block_ids.*make setup-vllm"):
        require_fields(module, "Kept", "req_id block_ids")
    with pytest.raises(ConfigError, match="found: no req_id"):
        require_fields(module, "Gone", "req_id")
    with pytest.raises(ConfigError, match="has req_states"):
        require_names(SimpleNamespace(sampler=None), ("sampler", "req_states"))
    with pytest.raises(ConfigError, match=r"written for 0\.32\.x \(found: 0\.33\.0\)"):
        require(False, "written for 0.32.x", "0.33.0")


def test_mapped_kv_is_one_memory_also_once_its_file_is_gone(tmp_path: Path) -> None:
    part = KvPart(str(tmp_path / "0-0"), (3, 2, 4), torch.bfloat16)
    one, other = part.mapped(), part.mapped()
    (tmp_path / "0-0").unlink()
    kept = torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    alias = kept  # as a layer has it
    kept.set_(one.untyped_storage(), 0, one.shape, one.stride())
    alias[1] = 7.0
    assert torch.equal(other[1], torch.full((2, 4), 7.0, dtype=torch.bfloat16))
    assert not other[0].any() and not other[2].any()
