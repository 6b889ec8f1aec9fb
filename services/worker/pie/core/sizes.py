"""How many blocks at which level, and of how many buffers: the arithmetic of Pie. Pure.

`fifo_layers` (q in algorithms.md §6) is 0, or 3 and more: with 1 or 2 the two buffers would cost more than
the swapped layers give back. All buffers count as device bytes. Source: papers/004 §3.1 and §3.3; the ratio
is that of algorithms.md (the paper's counts four buffers)."""

LEAST_FIFO_LAYERS = 3
_LEAST_SLOTS = 3
"""One layer that is computed, one that comes, one that goes."""


def device_slots(layers: int, fifo_layers: int) -> int:
    """Slots on the device. Raises ValueError for a FIFO that there cannot be."""
    if fifo_layers == 0:
        return layers
    if not LEAST_FIFO_LAYERS <= fifo_layers <= most_fifo_layers(layers):
        raise ValueError(f"{fifo_layers} of {layers} layers in the FIFO: 0, or from 3 to {layers - 1}")
    return layers - fifo_layers + 2


def most_fifo_layers(layers: int) -> int:
    """The longest FIFO of a model; 0 where it has too few layers."""
    most = layers - _LEAST_SLOTS + 2
    return most if most >= LEAST_FIFO_LAYERS else 0


def expansion(layers: int, fifo_layers: int) -> float:
    """Blocks per layer, as a multiple of those without Pie on the same device bytes."""
    return layers / device_slots(layers, fifo_layers)


def slot_blocks(layers: int, fifo_layers: int, device_blocks: int) -> int:
    """Blocks of one layer that a slot holds, where each layer would have `device_blocks` without Pie."""
    return layers * device_blocks // device_slots(layers, fifo_layers)


def higher(fifo_layers: int) -> int:
    return LEAST_FIFO_LAYERS if fifo_layers == 0 else fifo_layers + 1


def lower(fifo_layers: int) -> int:
    return 0 if fifo_layers <= LEAST_FIFO_LAYERS else fifo_layers - 1


def spare_blocks(layers: int, fifo_layers: int, device_blocks: int) -> int:
    """Return the device blocks given up to buffers so that as many blocks fit as with a FIFO of layers.
    A block is swapped through two buffers of one layer each, so one block given up has room for `layers` / 2:
    of 8 layers, 20 of 420 blocks bring 80 from outside, and 480 - 60 are there."""
    extra = slot_blocks(layers, fifo_layers, device_blocks) - device_blocks
    return -(-2 * extra // (layers - 2)) if extra > 0 else 0


def swaps_in_blocks(fifo_layers: int) -> int:
    """Return a number in proportion to the buffers of a level, with which a step's copies grow."""
    return max(0, fifo_layers - 2)


def most_in_blocks(layers: int, device_blocks: int, host_blocks: int) -> int:
    """The highest level at which each block has a place on the host, within `host_blocks` blocks of one
    layer."""
    fits = 0
    for fifo_layers in range(LEAST_FIFO_LAYERS, most_fifo_layers(layers) + 1):
        if layers * slot_blocks(layers, fifo_layers, device_blocks) <= host_blocks:
            fits = fifo_layers
    return fits
