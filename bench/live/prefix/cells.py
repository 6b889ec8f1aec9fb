"""What is compared live: which tiers there are, in which order prompts are placed, whether is read ahead."""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.live.prefix.text import BLOCK_TOKENS, Templates

_FLOAT_BYTES = 4
_MEBI = 1 << 20
NONE = "none"
TIERS = ("device", "device+host", "device+host+disk")
ORDERS = ("fcfs", "fpf", "relaxed_fpf")


@dataclass(frozen=True)
class TierCell:
    """One configuration of a stack. Without tiers there is no prefix cache."""

    tiers: str
    order: str = "fcfs"
    prefetch: bool = True

    @property
    def name(self) -> str:
        if self.tiers == NONE:
            return NONE
        return f"{self.tiers} {self.order}{'' if self.prefetch else ' no-prefetch'}"

    def settings(self, shape: Templates, block_bytes: int, folder: Path) -> dict[str, object]:
        """For the stack; `folder` takes the disk tier."""
        if self.tiers == NONE:
            return {"worker.prefix_cache.enabled": "false", "placement.order": self.order}
        found: dict[str, object] = {
            "worker.prefix_cache.enabled": "true",
            "worker.prefix_cache.host_mb": 0,
            "placement.order": self.order,
            "worker.prefix_cache.lookahead_sequences": 64 if self.prefetch else 0,
        }
        if "host" in self.tiers:
            found["worker.prefix_cache.host_blocks"] = shape.host * shape.prefix_blocks
        if "disk" in self.tiers:
            disk_bytes = shape.disk * shape.prefix_blocks * block_bytes
            found["worker.prefix_cache.disk_mb"] = -(-disk_bytes // _MEBI) + 1
            found["worker.prefix_cache.disk_path"] = str(folder)
        return found


def cells(*, quick: bool) -> list[TierCell]:
    """Without a cache first; the reader ahead matters where there is a disk."""
    if quick:
        return [TierCell(NONE), TierCell(TIERS[-1])]
    with_orders = [TierCell(tiers, order) for tiers in TIERS for order in ORDERS]
    return [
        TierCell(NONE),
        *with_orders,
        *(TierCell(TIERS[-1], order, prefetch=False) for order in ORDERS[:2]),
    ]


def block_bytes(model: Path) -> int:
    """K and V of one block over all layers, in float32. Raises KeyError for a config of another kind."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * heads * head * BLOCK_TOKENS * _FLOAT_BYTES)
