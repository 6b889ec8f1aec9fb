"""The mapping table of Pie's paper: where each layer's KV is, with updates in two phases. Pure.

`begin_…` takes a transfer's destination; `end_…` makes the layer present there and frees the source. Source:
papers/004 §3.2, figure 3.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.worker.pie.core.sizes import device_slots


class LayerPlace(StrEnum):
    """Where a layer's KV is, or is moving to."""

    DEVICE = "device"
    LEAVING = "leaving"
    """Valid on the device until the host copy is complete, and read-only."""
    HOST = "host"
    ARRIVING = "arriving"


@dataclass(slots=True)
class LayerEntry:
    """State of one layer."""

    place: LayerPlace
    device_slot: int | None
    host_slot: int | None
    since_s: float


class MappingTable:
    """Maps layers 0 … n-1 to slots of the device and the host; slot numbers start at 0 without gaps.

    With a queue of `fifo_layers`, layers without a device slot start on the host.
    """

    def __init__(self, layers: int, fifo_layers: int = 0) -> None:
        self.layers = layers
        self.slots = device_slots(layers, fifo_layers)
        """Device slots, used or free."""
        self.entries = [
            LayerEntry(LayerPlace.DEVICE, layer, None, 0.0)
            if layer < self.slots
            else LayerEntry(LayerPlace.HOST, None, layer - self.slots, 0.0)
            for layer in range(layers)
        ]
        self.present = set(self.layers_at(LayerPlace.DEVICE))
        """Layers that can be computed. `on_host` has the layers that are only on the host."""
        self.on_host = set(self.layers_at(LayerPlace.HOST))
        self._free_slots = set(range(self.slots)) - {each.device_slot for each in self.entries}
        self._free_host = set(range(layers)) - {each.host_slot for each in self.entries}

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def absent(self) -> int:
        """Number of layers that cannot be computed now."""
        return self.layers - len(self.present)

    def layers_at(self, *places: LayerPlace) -> list[int]:
        return [layer for layer, entry in enumerate(self.entries) if entry.place in places]

    def is_present(self, layer: int) -> bool:
        return layer in self.present

    def begin_leaving(self, layer: int, now_s: float) -> LayerEntry:
        entry = self._take(layer, LayerPlace.DEVICE)
        self.present.remove(layer)
        entry.host_slot = min(self._free_host)
        self._free_host.remove(entry.host_slot)
        entry.place, entry.since_s = LayerPlace.LEAVING, now_s
        return entry

    def end_leaving(self, layer: int, now_s: float) -> None:
        entry = self._take(layer, LayerPlace.LEAVING)
        assert entry.device_slot is not None
        self._free_slots.add(entry.device_slot)
        self.on_host.add(layer)
        entry.place, entry.device_slot, entry.since_s = LayerPlace.HOST, None, now_s

    def begin_arriving(self, layer: int, now_s: float) -> LayerEntry:
        entry = self._take(layer, LayerPlace.HOST)
        entry.device_slot = min(self._free_slots)
        self.on_host.remove(layer)
        self._free_slots.remove(entry.device_slot)
        entry.place, entry.since_s = LayerPlace.ARRIVING, now_s
        return entry

    def end_arriving(self, layer: int, now_s: float) -> None:
        entry = self._take(layer, LayerPlace.ARRIVING)
        assert entry.host_slot is not None
        self._free_host.add(entry.host_slot)
        entry.host_slot = None
        self.present.add(layer)
        entry.place, entry.since_s = LayerPlace.DEVICE, now_s

    def add_slot(self) -> int:
        """Add a free slot and return its number."""
        self._free_slots.add(self.slots)
        self.slots += 1
        return self.slots - 1

    def retire_slot(self) -> tuple[int, int] | None:
        """Retire the last slot. Raises ValueError if none is free or the last one is in a transfer.

        Returns (from, to) if the layer in the last slot must move to a free one, else None.
        """
        last = self.slots - 1
        if last in self._free_slots:
            self._free_slots.remove(last)
            self.slots = last
            return None
        moved = next(entry for entry in self.entries if entry.device_slot == last)
        if not self._free_slots or moved.place is not LayerPlace.DEVICE:
            raise ValueError(
                f"slot {last} cannot be retired: {self.free_slots} free, its layer {moved.place}"
            )
        to = min(self._free_slots)
        self._free_slots.remove(to)
        moved.device_slot = to
        self.slots = last
        return last, to

    def _take(self, layer: int, place: LayerPlace) -> LayerEntry:
        entry = self.entries[layer]
        if entry.place is not place:
            raise ValueError(f"layer {layer} is {entry.place}, not {place}")
        return entry

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free or holds one layer, and places agree with slots."""
        held = [entry.device_slot for entry in self.entries if entry.device_slot is not None]
        assert sorted([*held, *self._free_slots]) == list(range(self.slots)), (
            "a slot is lost or holds two layers"
        )
        host = [entry.host_slot for entry in self.entries if entry.host_slot is not None]
        assert sorted([*host, *self._free_host]) == list(range(self.layers)), (
            "a host slot is lost or held twice"
        )
        assert self.present == set(self.layers_at(LayerPlace.DEVICE))
        assert self.on_host == set(self.layers_at(LayerPlace.HOST))
        for entry in self.entries:
            assert (entry.device_slot is None) == (entry.place is LayerPlace.HOST)
            assert entry.host_slot is not None or entry.place is LayerPlace.DEVICE
            assert entry.host_slot is None or entry.place is not LayerPlace.DEVICE
