"""Compares stored KV with recomputed KV for a sample of hits.

A checksum finds bytes that changed after they were stored; an audit finds KV that was wrong before. Rounding
changes less than half of the digits. For the engine's thread."""

import math
from random import Random

import numpy as np
import numpy.typing as npt

from services.worker.kv.tiers.records import LayerPools, Records
from shared.log import get_logger
from shared.metrics import counter

_log = get_logger("worker.audit")
_audited = counter(
    "kvasir_worker_audited_blocks_total", "Stored blocks that were compared with a new computation."
)
_wrong = counter(
    "kvasir_worker_audit_mismatches_total",
    "Stored blocks that were not what was computed anew, and were dropped.",
)
_EPSILONS = {"bfloat16": 2.0**-8, "int8": 2.0**-7}


class SampledAudit:
    """Implements `Auditor`."""

    def __init__(self, records: Records, pools: LayerPools, rate: float) -> None:
        """`records` has no other user; `rate`: share of hits. Raises ValueError for an unknown type of KV."""
        self._records = records
        self._rate = rate
        self._random = Random()
        self._kind = str(pools[0][0].dtype).removeprefix("torch.")
        self._shapes = [tuple(pool.shape[1:]) for layer in pools for pool in layer]
        epsilon = _EPSILONS.get(self._kind) or _epsilon(self._kind)
        self.tolerance = math.sqrt(epsilon)
        """Largest difference, as a share of the largest number in a layer's K or V."""
        self._rows = np.empty((2, records.record_bytes), dtype=np.uint8)
        self.audited_blocks = self.wrong_blocks = 0

    def is_due(self) -> bool:
        return self._random.random() < self._rate

    def agree(self, stored: int, computed: int) -> bool:
        self._records.read([stored, computed], list(self._rows))
        self.audited_blocks += 1
        _audited.inc()
        parts = enumerate(self._records.parts_of(self._rows))
        difference = max(self._difference(part, number) for number, part in parts)
        if difference <= self.tolerance:
            return True
        self.wrong_blocks += 1
        _wrong.inc()
        _log.error(
            "stored block %d differs by %.3g of its largest number (allowed: %.3g): dropped",
            stored,
            difference,
            self.tolerance,
        )
        return False

    def _difference(self, part: npt.NDArray[np.uint8], number: int) -> float:
        """Return the difference in a layer's K or V, `[2, bytes]`; NaN differs from everything."""
        stored, computed = self._numbers(part, number)
        largest = float(np.abs(computed).max(initial=0.0))
        found = float(np.abs(stored - computed).max(initial=0.0))
        return found / max(largest, float(np.finfo(np.float32).tiny)) if math.isfinite(found) else math.inf

    def _numbers(self, part: npt.NDArray[np.uint8], number: int) -> npt.NDArray[np.float64]:
        part = np.ascontiguousarray(part)
        if self._kind == "int8":
            return self._unscaled(
                part.view(np.int8).reshape(2, *self._shapes[number]), is_key=number % 2 == 0
            )
        if self._kind == "bfloat16":
            return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return part.view(np.dtype(self._kind)).astype(np.float64)

    @staticmethod
    def _unscaled(whole: npt.NDArray[np.int8], *, is_key: bool) -> npt.NDArray[np.float64]:
        """Return int8 numbers times their scales; for the layout see `attention.h`."""
        if is_key:
            scales = np.ascontiguousarray(whole[:, :, -4:]).reshape(*whole.shape[:2], -1).view(np.float32)
            return np.asarray(whole[:, :, :-4] * scales[:, :, None], np.float64)
        return np.asarray(
            whole[..., :-4] * np.ascontiguousarray(whole[..., -4:]).view(np.float32), np.float64
        )


def _epsilon(kind: str) -> float:
    """Return the rounding unit of a type; 0 for whole numbers. Raises ValueError."""
    try:
        made = np.dtype(kind)
    except TypeError:
        raise ValueError(f"KV of {kind} cannot be compared") from None
    return float(np.finfo(made).eps) if made.kind == "f" else 0.0
