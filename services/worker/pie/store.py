"""The KV of all layers behind Pie: hands each layer to its computation when its KV is there, and swaps
meanwhile.

The shell around the swap controller, the memory and a copier. `step_begins`, `enter`, `leave` and
`step_ends` are called by the engine's thread alone; completions come on the copier's threads. Knows no
model and no sequence.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from services.worker.pie.copier import Copier
from services.worker.pie.core.copies import HostCopies, Runs, set_of
from services.worker.pie.core.meter import SwapMeter
from services.worker.pie.core.swap import Direction, SwapController, Transfer
from services.worker.pie.memory import LayerMemory
from shared.errors import InternalError

SlotPools = tuple[torch.Tensor, torch.Tensor]


class LayerStore:
    """Layers of one shape in slots. Raises InternalError where a layer does not arrive in time, or a copy
    failed.
    """

    def __init__(
        self,
        controller: SwapController,
        memory: LayerMemory,
        copier: Copier,
        clock: Callable[[], float],
        *,
        wait_timeout_s: float,
    ) -> None:
        self.controller, self.memory, self.meter = controller, memory, SwapMeter(controller.table.layers)
        self.version = 0
        """Changes whenever a layer's pools do, while everything is static."""
        self.copies = HostCopies(controller.table.layers)
        self._copier, self._clock, self._wait_timeout_s = copier, clock, wait_timeout_s
        self._condition = threading.Condition()
        self._failure: BaseException | None = None
        self._seen: set[int] = set()
        self._source: Callable[[], Sequence[int]] = lambda: sorted(self._seen)
        self._count: Callable[[], int] = lambda: len(self._seen)
        self._is_attached = False
        self._used: int | None = None
        """Set of the blocks in use when this step began; None until a copy needs them."""
        self._written = 0
        """Set of the blocks that this step writes to, in every layer."""
        self._began_s = self._stalled_s = 0.0
        copier.start(self._on_done)

    @property
    def is_static(self) -> bool:
        """All layers are present and stay where they are until the next step begins."""
        return self.controller.is_static

    def attach(
        self, used_blocks: Callable[[], Sequence[int]], count: Callable[[], int] | None = None
    ) -> None:
        """Who knows the blocks in use, ascending, and how many they are. Until then every block that was
        ever in a step is."""
        self._source, self._is_attached = used_blocks, True
        self._count = count or (lambda: len(used_blocks()))

    def step_begins(
        self, blocks: Iterable[Sequence[int]], written: Iterable[Sequence[int]] | None = None
    ) -> None:
        """`blocks` of each row of the step; what `attach` was given has them, too.

        `written`: those of them that the step writes to; None: any block in use. Nobody else may write.
        """
        if not self._is_attached:
            for each in blocks:
                self._seen.update(each)
        self._used, self._written = None, 0  # While it is static both are nobody's business: `set_fifo`.
        if not self.is_static:
            self._used = set_of(self._source())
            self._written = self._used if written is None else _joined(written)
        self._began_s, self._stalled_s = self._clock(), 0.0

    def step_ends(self, tokens: int, *, is_decoding: bool) -> None:
        """The step sampled so many tokens; `is_decoding`: and computed no prompt."""
        compute_s = self._clock() - self._began_s - self._stalled_s
        self.meter.on_step(tokens, compute_s, self._stalled_s, self._count(), is_decoding=is_decoding)

    def enter(self, layer: int) -> SlotPools:
        """Wait until the layer's KV is present; its pools, to be used until `leave`."""
        self._copier.poll()
        with self._condition:
            self._submit(self.controller.on_awaited(layer, self._clock()))
            if not self.controller.table.is_present(layer):
                self._wait(layer)
            self.controller.on_started(layer)
            self.copies.on_written(layer, self._written)
            slot = self.controller.table.entries[layer].device_slot
        assert slot is not None
        self._copier.before_layer()
        return self.memory.views(slot)

    def leave(self, layer: int) -> None:
        """The layer's KV is complete for this step."""
        self._copier.after_layer()
        with self._condition:
            self._submit(self.controller.on_ended(layer, self._clock()))

    def views(self, layer: int) -> SlotPools:
        """The pools of a layer of a static store."""
        slot = self.controller.table.entries[layer].device_slot
        assert slot is not None
        return self.memory.views(slot)

    def set_fifo(self, fifo_layers: int) -> None:
        """A new length of the queue. Between two steps only."""
        with self._condition:
            if self.is_static:  # Nobody has told what was written since it became so.
                self.copies.forget_all()
            self._submit(self.controller.set_fifo(fifo_layers, self._clock()))

    def resize(self) -> bool:
        """Bring the number of slots to what the FIFO's length asks for. Between two steps only.

        Waits for transfers in flight. False when no slot is free yet: later.
        """
        controller, began_s = self.controller, self._clock()
        with self._condition:
            if controller.excess_slots > 0 and not controller.can_retire_slot:
                return False
            controller.pause()
            try:
                self._quiesce()
                self._recut()
            finally:
                self._used = None
                self._submit(controller.resume(self._clock()))
        self.version += 1
        self.meter.resize_s += self._clock() - began_s
        return True

    def move_blocks(self, moves: Mapping[int, int]) -> None:
        """The contents of blocks to others, in all layers, wherever each is. Between two steps only.

        Waits for transfers in flight. To lower ids, as older copies on the host do not have all higher ones:
        else ValueError.
        """
        if any(to >= block for block, to in moves.items()):
            raise ValueError(f"blocks can be moved down only: {dict(moves)}")
        controller, began_s = self.controller, self._clock()
        with self._condition:
            controller.pause()
            try:
                self._quiesce()
                for layer, entry in enumerate(controller.table.entries):
                    if entry.device_slot is not None:
                        self.memory.move_blocks(entry.device_slot, moves)
                        self.copies.on_moved(layer, moves)
                    elif entry.host_slot is not None:
                        self.memory.rename_blocks(entry.host_slot, self.copies.on_renamed(layer, moves))
                self._copier.after_layer()
            finally:
                self._used = None
                self._submit(controller.resume(self._clock()))
        self.meter.resize_s += self._clock() - began_s

    def _recut(self) -> None:
        controller, partition = self.controller, self.memory.partition
        while controller.can_retire_slot:
            moved = controller.retire_slot()
            if moved is not None:
                self.memory.relocate(moved.from_slot, moved.to_slot)
        added = max(0, -controller.excess_slots)
        entries = controller.table.entries
        occupied = frozenset(entry.device_slot for entry in entries if entry.device_slot is not None)
        self.memory.shift(partition.resize(controller.table.slots + added), occupied)
        self.copies.cut(partition.slot_blocks)
        self._copier.after_layer()
        for _ in range(added):
            controller.add_slot()

    def check_integrity(self) -> None:
        """AssertionError unless the controller's books are sound; copies may be under way."""
        with self._condition:
            self.controller.check_integrity()
            for layer, entry in enumerate(self.controller.table.entries):
                assert entry.host_slot is not None or not self.copies.fresh(layer), "a copy that is nowhere"

    def close(self, deadline_s: float) -> bool:
        """End the copier; False when that took longer."""
        with self._condition:
            self.controller.pause()
        return self._copier.close(deadline_s)

    def _wait(self, layer: int) -> None:
        began_s = self._clock()
        self._wait_until(lambda: self.controller.table.is_present(layer), f"layer {layer}")
        waited_s = self._clock() - began_s
        self._stalled_s += waited_s
        self.meter.on_stall(layer, waited_s)

    def _quiesce(self) -> None:
        self._wait_until(lambda: not self.controller.in_flight, "the transfers in flight")

    def _wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Holds the lock but while it waits."""
        deadline_s = self._clock() + self._wait_timeout_s
        while self._failure is None and not is_over():
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                raise InternalError(f"{what} did not arrive within {self._wait_timeout_s:g} s")
            self._condition.wait(min(left_s, self._copier.poll_interval_s))
            self._copier.poll()
        if self._failure is not None:
            raise InternalError(f"a copy of KV failed: {self._failure!r}") from self._failure

    def _submit(self, transfers: Sequence[Transfer]) -> None:
        if not transfers:
            return
        if self._used is None:  # Between two steps; within one they are known.
            self._used = set_of(self._source())
        for transfer in transfers:
            self._copier.submit(transfer, self._runs(transfer, self._used))

    def _runs(self, transfer: Transfer, used: int) -> Runs:
        """What has to be copied."""
        layer, copies = transfer.layer, self.copies
        if transfer.direction is Direction.IN:
            return self.memory.runs_in(copies.arrive(layer, used), copies.fresh(layer))
        if self.memory.reserve(transfer.host_slot):
            copies.forget(layer)
        return self.memory.runs_out(copies.leave(layer, used))

    def _on_done(
        self, transfer: Transfer, sent_bytes: int, took_s: float, error: BaseException | None
    ) -> None:
        with self._condition:
            if error is not None:
                self._failure = error
            else:
                self.meter.on_copied(transfer.direction, sent_bytes, took_s)
                following = self.controller.on_completed(transfer, self._clock())
                if transfer.direction is Direction.IN and not self.controller.table.is_kept(transfer.layer):
                    self.copies.forget(transfer.layer)
                self._submit(following)
            self._condition.notify_all()


def _joined(blocks: Iterable[Sequence[int]]) -> int:
    """The set of them all."""
    found = 0
    for each in blocks:
        for block in each:
            found |= 1 << block
    return found
