"""Records of pools on a GPU: what goes to or from it passes through one piece of page-locked memory."""

from collections.abc import Sequence
from typing import Any

import torch

from services.worker.kv.tiers.records import LayerPool, LayerPools, RecordRow, Records


class GpuRecords(Records):
    """See `Records`. Copies run in order of the stream that is current, those of a twin on one of its own."""

    def __init__(self, pools: LayerPools) -> None:
        super().__init__(pools)
        self._device: torch.device = self._parts[0].device
        self._stream: torch.cuda.Stream | None = None
        self._pinned = torch.empty(0, self.record_bytes, dtype=torch.uint8)

    def twin(self) -> "GpuRecords":
        twin = GpuRecords(self._pools)
        twin._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return twin

    def read(self, blocks: Sequence[int], rows: Sequence[RecordRow]) -> None:
        staged = self._staging(len(blocks))
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._device)
            gathered = torch.cat([part.index_select(0, index) for part in self._parts], dim=1)
            staged.copy_(gathered, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
        for record, row in zip(staged.numpy(), rows, strict=True):
            row[:] = record

    def write(self, rows: Sequence[RecordRow], blocks: Sequence[int]) -> None:
        staged = self._staging(len(blocks))
        for record, row in zip(staged.numpy(), rows, strict=True):
            record[:] = row
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._device)
            arrived = staged.to(self._device, non_blocking=True)
            for part, start, end in zip(self._parts, self._starts, self._ends, strict=True):
                part.index_copy_(0, index, arrived[:, start:end])
            torch.cuda.current_stream(self._device).synchronize()

    def _rows(self, pool: LayerPool) -> Any:
        assert isinstance(pool, torch.Tensor), "arrays lie in the host's memory"
        return pool.view(len(pool), -1).view(torch.uint8)

    def _staging(self, rows: int) -> torch.Tensor:
        """So large that one copy crosses the bus at its full speed."""
        if self._pinned.shape[0] < rows:
            with torch.inference_mode(False):  # in a step or not, the next one writes to it
                self._pinned = torch.empty(rows, self.record_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:rows]
