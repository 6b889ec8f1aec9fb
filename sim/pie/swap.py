"""The swap controller of Pie's paper: decides which layer's KV moves next, and when. Pure.

At every event (a layer is awaited, a layer ended, a transfer completed) each idle direction starts at most
one transfer. In: the *hottest* layer on the host (the next to be computed). Out: the *coldest* on the device
(the last computed), unless every layer on the host is colder. At most `fifo_layers` layers are absent, so
swapped layers form a queue in the order of computation. 6 layers, a queue of 3, 5 slots:

    after layer 0    l D D D D h    0 leaves and frees a slot for 5, the next absent layer needed
    after layer 1    h l D D D D    5 has arrived; 1 leaves, its slot is for 0
    after layer 2    D h l D D D    0 arrived long before it is needed; 2 leaves, its slot is for 1

D is present, h on the host, l leaving. Source: papers/004 §3.3, figure 4; algorithms.md §6.
"""

from dataclasses import dataclass

from services.worker.pie.core.meter import Direction
from services.worker.pie.core.sizes import device_slots
from sim.pie.table import LayerPlace, MappingTable


@dataclass(frozen=True, slots=True)
class SwapTransfer:
    """Copy of one layer's KV between a device slot and a host slot."""

    layer: int
    direction: Direction
    device_slot: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Copy of one layer's KV from one device slot to another."""

    layer: int
    from_slot: int
    to_slot: int


class SwapController:
    """Drives one `MappingTable`. The caller runs the transfers and reports each completion once."""

    def __init__(self, layers: int, fifo_layers: int = 0) -> None:
        self.table = MappingTable(layers, fifo_layers)
        self.fifo_layers = fifo_layers
        self.position = 0
        """The layer that is awaited, computed or next; it is never swapped out."""
        self.is_paused = False
        """No transfer starts, so that slots can be moved."""
        self.swap_ins = 0
        self.early_swap_ins = 0
        """Swap-ins that started before the layer was needed by the current token."""
        self._computed: int | None = None
        self._in_flight: dict[Direction, SwapTransfer] = {}

    @property
    def is_static(self) -> bool:
        """Whether every layer is present permanently, so nothing is ever swapped."""
        table = self.table
        return self.fifo_layers == 0 and table.slots == table.layers and not table.absent

    @property
    def excess_slots(self) -> int:
        """Slots to retire after the queue grew, or missing slots (negative) after it shrank."""
        return self.table.slots - device_slots(self.table.layers, self.fifo_layers)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def on_awaited(self, layer: int, now_s: float) -> list[SwapTransfer]:
        """The computation reached `layer`, present or not. A step may be aborted, so any layer may follow."""
        self._computed = None
        self.position = layer
        return self._start(now_s)

    def on_started(self, layer: int) -> None:
        """The layer's computation starts. Raises ValueError if its KV is not present."""
        if not self.table.is_present(layer) or layer != self.position:
            raise ValueError(f"layer {layer} is {self.table.entries[layer].place}, at {self.position}")
        self._computed = layer

    def on_ended(self, layer: int, now_s: float) -> list[SwapTransfer]:
        """The layer's KV is no longer used by the current token."""
        self._computed = None
        self.position = (layer + 1) % self.table.layers
        return self._start(now_s)

    def on_completed(self, transfer: SwapTransfer, now_s: float) -> list[SwapTransfer]:
        """End a transfer. Raises ValueError if it is not in flight."""
        if self._in_flight.get(transfer.direction) != transfer:
            raise ValueError(f"{transfer} is not in flight")
        del self._in_flight[transfer.direction]
        if transfer.direction is Direction.IN:
            self.table.end_arriving(transfer.layer, now_s)
        else:
            self.table.end_leaving(transfer.layer, now_s)
        return self._start(now_s)

    def set_fifo(self, fifo_layers: int, now_s: float) -> list[SwapTransfer]:
        """Set the queue's length. A longer queue leaves excess slots for `retire_slot`; a shorter one
        needs `add_slot`.
        """
        device_slots(self.table.layers, fifo_layers)
        self.fifo_layers = fifo_layers
        return self._start(now_s)

    def pause(self) -> None:
        """Start no transfer until `resume`."""
        self.is_paused = True

    def resume(self, now_s: float) -> list[SwapTransfer]:
        self.is_paused = False
        return self._start(now_s)

    @property
    def can_retire_slot(self) -> bool:
        return self.excess_slots > 0 and self.table.free_slots > 0

    def retire_slot(self) -> SlotMove | None:
        """Retire the last slot; return the copy needed first, if any. Raises ValueError while transfers
        are in flight.
        """
        if self._in_flight or not self.can_retire_slot:
            raise ValueError(f"{self.in_flight} transfers in flight, {self.table.free_slots} slots free")
        moved = self.table.retire_slot()
        if moved is None:
            return None
        layer = next(i for i, each in enumerate(self.table.entries) if each.device_slot == moved[1])
        return SlotMove(layer, *moved)

    def add_slot(self) -> None:
        self.table.add_slot()

    def _distance(self, layer: int) -> int:
        """Return the number of layers computed before this one is needed."""
        return (layer - self.position) % self.table.layers

    def _start(self, now_s: float) -> list[SwapTransfer]:
        if self.is_paused or self.is_static:
            return []
        if len(self._in_flight) == len(Direction):
            return []
        hottest = min(self.table.on_host, key=self._distance, default=None)
        started = []
        has_room = self.table.free_slots > max(0, self.excess_slots)  # Slots to be retired stay free.
        if Direction.IN not in self._in_flight and hottest is not None and has_room:
            entry = self.table.begin_arriving(hottest, now_s)
            self.swap_ins += 1
            self.early_swap_ins += hottest < self.position
            started.append(self._fly(hottest, Direction.IN, entry.device_slot, entry.host_slot))
        if Direction.OUT not in self._in_flight and self.table.absent < self._most_absent:
            coldest = max(self.table.present, key=self._distance, default=None)
            if coldest is not None and self._may_leave(coldest, hottest):
                entry = self.table.begin_leaving(coldest, now_s)
                started.append(self._fly(coldest, Direction.OUT, entry.device_slot, entry.host_slot))
        return started

    @property
    def _most_absent(self) -> int:
        """The queue's length; the old length while slots are missing, so that an awaited layer finds a
        slot.
        """
        missing = self.table.layers - self.table.slots
        return max(self.fifo_layers, missing + 2 if missing else 0)

    def _may_leave(self, coldest: int, hottest: int | None) -> bool:
        if coldest == self.position:
            return False
        is_slot_owed = self.excess_slots > self.table.free_slots
        is_hotter = hottest is not None and self._distance(hottest) < self._distance(coldest)
        return is_slot_owed or is_hotter

    def _fly(
        self, layer: int, direction: Direction, device_slot: int | None, host_slot: int | None
    ) -> SwapTransfer:
        assert device_slot is not None
        assert host_slot is not None
        transfer = SwapTransfer(layer, direction, device_slot, host_slot)
        self._in_flight[direction] = transfer
        return transfer

    def check_integrity(self) -> None:
        """Raises AssertionError unless table and transfers agree and the computed layer is present."""
        self.table.check_integrity()
        for direction, place in ((Direction.IN, LayerPlace.ARRIVING), (Direction.OUT, LayerPlace.LEAVING)):
            flying = self._in_flight.get(direction)
            assert self.table.layers_at(place) == ([] if flying is None else [flying.layer])
            if flying is not None:
                entry = self.table.entries[flying.layer]
                assert (entry.device_slot, entry.host_slot) == (flying.device_slot, flying.host_slot)
        assert self._computed is None or self.table.is_present(self._computed), "computed without its KV"
        assert self.table.slots >= 1 and 0 <= self.early_swap_ins <= self.swap_ins
