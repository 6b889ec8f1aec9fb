"""All mechanisms at once on virtual time, and of every place of KV what is in it.

Workers hold more blocks than their device: `Residency`, `GrownPool` and `BlockPie` are the real ones, and
so are the rules of the tiers and of lending. What is copied is copied here as well. A place has for each of
its tokens the digest of all tokens up to it; an engine that reads anything but its sequence's fails the test.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any, cast

import msgspec
import numpy as np

from services.scheduler.core.effects import Effect, WantKvAtWorker
from services.worker.core.plans import StepWork, WorkItem
from services.worker.kv.core.block_pool import BlockPool, RowShare
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.kv.core.residency import Residency, StepPlan
from services.worker.kv.tiers.resident import ResidentKv, StreamFigures
from services.worker.pie.blocks import BlockPie
from services.worker.pie.core.expansion import ExpansionController
from services.worker.pie.core.sizes import slot_blocks, spare_blocks, swaps_in_blocks
from tests.stack.actors import Wanted, WorkerProcess
from tests.stack.mixed_world import BLOCKS, MixedWorld, Parts
from tests.stack.world import Pace
from tests.virtual_net import Process

LAYERS, MOST_LEVEL = 8, 6
IDS = slot_blocks(LAYERS, MOST_LEVEL, BLOCKS) + spare_blocks(LAYERS, MOST_LEVEL, BLOCKS)
MOST_LENT = (BLOCKS - spare_blocks(LAYERS, MOST_LEVEL, BLOCKS)) // 2
HOST_BLOCKS = 40
ROWS = slot_blocks(LAYERS, MOST_LEVEL, BLOCKS)
SPOILT = 0.05
"""Of the copies on the host that are looked at before their blocks leave the device."""
BLOCK_TOKENS = 16
Content = list[int]


class Memory:
    """One worker's device and own host memory, in one life: what `BlockPie` asks of `ResidentKv`."""

    layers, layer_block_bytes = LAYERS, 1

    def __init__(self, random: Random, clock: Callable[[], float]) -> None:
        self.random = random
        rows = RowShare(BlockPool(ROWS + HOST_BLOCKS, 1), ROWS)
        self.residency = Residency(BLOCKS, IDS, LAYERS, self._move, nullcontext(), rows)
        self.device: list[Content] = [[0] * BLOCK_TOKENS for _ in range(BLOCKS)]
        self.rows: dict[int, Content] = {}
        """The host tier's as well."""
        self.fetched = self.saved = 0
        controller = ExpansionController(LAYERS, MOST_LEVEL, swaps=swaps_in_blocks)
        self.growth = BlockPie(cast(ResidentKv, self), BLOCKS, controller, 0, 8, clock, notice_s=0.1)
        self.pool = self.growth.make_pool(BLOCK_TOKENS)

    def make_pool(self, total_blocks: int, block_tokens: int) -> GrownPool:
        return GrownPool(total_blocks, block_tokens, self.residency)

    def set_buffers(self, device_blocks: int, *, at_once: bool = False) -> bool:
        if device_blocks > self.residency.spare_blocks:
            return self.residency.reserve(device_blocks, at_once=at_once)
        self.residency.release(device_blocks)
        return True

    def figures(self) -> StreamFigures:
        layers = self.fetched * LAYERS
        return StreamFigures(0.0, 1e-6 * layers, 0.0, layers, layers, layers, self.saved)

    def read(self, block: int) -> Content:
        """A copy, as whoever copies blocks beside steps finds it."""
        slot = self.residency.slot_of(block)
        if slot is not None:
            return list(self.device[slot])
        return list(self.rows.get(self.residency.row_of(block), [0] * BLOCK_TOKENS))

    def write(self, block: int, content: Content) -> None:
        slot = self.residency.slot_of(block)
        if slot is None:
            self.rows[self.residency.row_of(block)] = list(content)
        else:
            self.device[slot] = list(content)
        self.residency.on_written(block)

    def step(self, read: set[int], written: set[int]) -> dict[int, Content]:
        """Where what a step reads is for it; those written to are the device's own. To be ended by `end`."""
        residency = self.residency
        if residency.is_plain:
            return {block: self.device[block] for block in read | written}
        residency.plan(*(np.array(sorted(blocks), dtype=np.int32) for blocks in (read | written, written)))
        plan = residency._plan
        assert plan is not None
        self.fetched += len(plan.fetched)
        for row, slot in zip(plan.fetched_from.tolist(), plan.place.tolist(), strict=True):
            if slot >= 0:
                self.device[slot] = list(self.rows[row])
        places: dict[int, Content] = {}
        for block in read | written:
            code = int(residency.codes[block])
            outside = code >= BLOCKS
            assert not outside or int(plan.fetched[code - BLOCKS]) == block
            row = int(plan.fetched_from[code - BLOCKS]) if outside else 0
            places[block] = self.rows[row] if outside else self.device[code]
        return places

    def end(self) -> None:
        plan = self.residency._plan
        if plan is not None:
            saved = self.random.randint(0, len(plan.saves))
            for row, slot in zip(plan.save_to[:saved].tolist(), plan.save_from[:saved].tolist(), strict=True):
                self.rows[row] = list(self.device[slot])
            self.saved += saved
            self.residency.end(saved, is_complete=True)
        self.residency.check_integrity()

    def _move(self, plan: StepPlan) -> None:
        for row, slot in zip(plan.saved_to.tolist(), plan.saved_from.tolist(), strict=True):
            self.rows[row] = list(self.device[slot])
        for row, slot in zip(plan.loaded_from.tolist(), plan.loaded_to.tolist(), strict=True):
            self.device[slot] = list(self.rows[row])


class EverythingWorld(MixedWorld):
    """Cache with a host tier and a small disk, lending, relief, moves, Pie; any worker may die."""

    def __init__(
        self, seed: int, wanted: list[Wanted], parts: Parts, *, workers: int, disk_blocks: int, pace: Pace
    ) -> None:
        self.memories: dict[str, Memory] = {}
        self._digests: dict[Any, Content] = {}
        self._gone: dict[str, set[int]] = defaultdict(set)
        """By debtor: borrowed blocks whose creditor has died."""
        self.copied_borrowed = 0
        """For moves, from their creditors."""
        lending = replace(parts, lends=True)
        tiers = {"host_blocks": HOST_BLOCKS, "disk_blocks": disk_blocks}
        super().__init__(seed, wanted, lending, workers=workers, pace=pace, **tiers)
        for says in (self.says, *(worker.says for worker in self.workers.values())):
            says["most_lent_blocks"] = MOST_LENT

    def own_pool(self, worker: WorkerProcess) -> BlockPool:
        memory = self.memories[worker.name] = Memory(self.random, lambda: self.now_s)
        return memory.pool

    def start_worker(self, name: str, **says: Any) -> None:
        super().start_worker(name, **says)
        memory, cache, tiers = self.memories[name], self.caches[name], self.tiers[name]
        tiers.read, tiers.write, tiers.content = memory.read, memory.write, memory.rows
        residency = memory.pool.residency
        residency.on_moved = cache.on_moved_block
        residency.is_intact = lambda block: cache.verify(
            block, lambda place, name: self.random.random() >= SPOILT
        )
        memory.growth.watch(
            lambda: cache.total_blocks - cache.free_blocks - cache.evictable_blocks, cache.shed
        )

    @property
    def own_ids(self) -> int:
        return IDS

    @property
    def longest_tokens(self) -> int:
        return (slot_blocks(LAYERS, MOST_LEVEL, BLOCKS) + (self.count - 1) * MOST_LENT) * BLOCK_TOKENS

    def _carry_out_plan(self, effect: Effect) -> None:
        if isinstance(effect, WantKvAtWorker) and effect.tokens:
            growth, blocks = self.memories[effect.worker_id].growth, -(-effect.tokens // BLOCK_TOKENS) + 1
            worker = self.workers[effect.worker_id]
            self.between_steps(worker, lambda: growth.demand(blocks))
            if blocks <= growth.most_blocks:
                effect = msgspec.structs.replace(effect, tokens=0)
        super()._carry_out_plan(effect)

    def between_steps(self, worker: WorkerProcess, action: Callable[[], None]) -> None:
        """Now, or when it has ended what it is at; never once it has died."""
        if worker.alive:
            (worker.mail.append if worker.busy or worker.frozen else lambda act: act())(action)

    def resize(self, number: int, level: int) -> None:
        """Somebody wants another level."""
        worker = self.workers[sorted(self.workers)[number % len(self.workers)]]
        growth = self.memories[worker.name].growth
        self.between_steps(worker, lambda: growth.want(level))

    # --- what is where

    def computed(self, worker: WorkerProcess, work: StepWork) -> set[int]:
        """Each item is read where it is, found to be its sequence's, and written."""
        memory, gone = self.memories[worker.name], self._gone[worker.name]
        lost = {at for at, item in enumerate(work.items) if not gone.isdisjoint(item.sequence.blocks)}
        items = [item for at, item in enumerate(work.items) if at not in lost]
        written = {block for item in items for block in self._written(item) if block < IDS}
        room = memory.residency.room_blocks
        if room is None or len(written) <= room:
            self._compute(worker.name, memory, items)
        else:
            for piece in [piece for item in items for piece in self._pieces(item, room)]:
                self._compute(worker.name, memory, [piece])
        sampled = sum(item.samples for item in items)
        memory.growth.step_ends(sampled, is_decoding=not work.prefilled_tokens)
        return lost

    def _pieces(self, item: WorkItem, room: int | None) -> list[WorkItem]:
        """As `TorchEngine` makes them."""
        assert room is not None and room > 1
        most = (room - 1) * BLOCK_TOKENS
        borders = [*range(item.first_token, item.end_token, most), item.end_token]
        return [msgspec.structs.replace(item, first_token=a, end_token=b) for a, b in pairwise(borders)]

    def _written(self, item: WorkItem) -> list[int]:
        first, end = item.first_token // BLOCK_TOKENS, -(-item.end_token // BLOCK_TOKENS)
        return list(item.sequence.blocks[first:end])

    def _compute(self, name: str, memory: Memory, items: list[WorkItem]) -> None:
        read = {b for i in items for b in i.sequence.blocks[: -(-i.end_token // BLOCK_TOKENS)]}
        written = {block for item in items for block in self._written(item)}
        places = memory.step({block for block in read if block < IDS}, {one for one in written if one < IDS})
        loans = self.loans[name]
        for block in read:
            if block >= IDS:
                creditor, place = loans.places[block]
                places[block] = self.memories[creditor].device[place]
        for item in items:
            truth = self._digest(item)
            for index, block in enumerate(item.sequence.blocks[: -(-item.end_token // BLOCK_TOKENS)]):
                first = index * BLOCK_TOKENS
                seen = max(0, min(BLOCK_TOKENS, item.first_token - first))
                assert places[block][:seen] == truth[first : first + seen], (
                    f"{name} reads what is not its sequence's: {item.sequence.ref}, block {index}"
                )
        for item in items:
            truth = self._digest(item)
            for position in range(item.first_token, item.end_token):
                block = item.sequence.blocks[position // BLOCK_TOKENS]
                places[block][position % BLOCK_TOKENS] = truth[position]
        memory.end()

    def _digest(self, item: WorkItem) -> Content:
        """Of all tokens up to each."""
        tokens = item.sequence.tokens
        found = self._digests.setdefault(item.sequence.ref, [])
        for token in tokens[len(found) : item.end_token]:
            found.append(hash((found[-1] if found else 0, token)))
        return found

    def copied(self, source: WorkerProcess, target: WorkerProcess, block: int, to: int) -> bool:
        if block < IDS:
            content = self.memories[source.name].read(block)
        elif block in (places := self.loans[source.name].places):
            creditor, place = places[block]
            content = list(self.memories[creditor].device[place])
            self.copied_borrowed += 1
        else:
            return False  # its creditor has died
        self.memories[target.name].write(to, content)
        return True

    def brought_home(self, pool: ExtendedPool, at_creditor: tuple[str, int], place: int) -> None:
        creditor, there = at_creditor
        debtor = next(name for name, loans in self.loans.items() if loans.pool is pool)
        self.memories[debtor].device[place] = list(self.memories[creditor].device[there])

    # --- deaths

    def kill(self, process: Process, back_after_s: float | None = None) -> None:
        """What it had borrowed goes back, and what it had lent is lost with it. Who is dead stays so."""
        if not process.alive:
            return
        if isinstance(process, WorkerProcess):
            self._gone[process.name].clear()
            self._give_back(self.loans[process.name], list(self.loans[process.name].places))
            for name, loans in self.loans.items():
                if name != process.name:
                    self._lose(self.workers[name], loans, process.name)
        super().kill(process, back_after_s)

    def _lose(self, debtor: WorkerProcess, loans: Any, creditor: str) -> None:
        lost = [number for number, (whose, _) in loans.places.items() if whose == creditor]

        for number in lost:
            del loans.places[number]
        self._gone[debtor.name].update(lost)

        def tell() -> None:
            debtor.core.on_kv_lost(lost, self.now_s)

        if lost:
            self.between_steps(debtor, tell)
