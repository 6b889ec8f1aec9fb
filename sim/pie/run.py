"""Simulate one worker with Pie: plain `vllm` with equal device bytes, a fixed queue, or the live controller.

Capacity follows the expansion as in a worker: growth is immediate; a shrink waits until allocated blocks fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.worker.core.costs import find_cost
from services.worker.pie.core.expansion import ExpansionController
from services.worker.pie.core.sizes import most_fifo_layers, slot_blocks
from sim.pie.cost import GH200, Interconnect, PieCost, PieModel
from sim.predictors import find_predictor
from sim.requests import SimRequest
from sim.setup import Outcome, Setup
from sim.simulation import Simulation

WINDOW_ITERATIONS = 32


@dataclass(frozen=True, slots=True)
class PieCase:
    """One worker. With `fifo_layers` None, the controller chooses the length."""

    model: PieModel
    device_bytes: float
    fifo_layers: int | None = 0
    policy: str = "vllm"
    link: Interconnect = GH200
    block_tokens: int = 16
    token_budget: int = 2048
    max_batch_sequences: int = 256

    @property
    def device_blocks(self) -> int:
        return self.model.capacity_blocks(self.device_bytes, self.block_tokens)

    def blocks(self, fifo_layers: int) -> int:
        return slot_blocks(self.model.layers, fifo_layers, self.device_blocks)


@dataclass(frozen=True, slots=True)
class PieOutcome:
    outcome: Outcome
    stall_share: float
    lengths: list[tuple[float, int]]
    """(time in s, queue length) at each change."""


class PieSimulation(Simulation):
    """A simulated worker whose capacity follows the expansion."""

    def __init__(self, case: PieCase, requests: Sequence[SimRequest]) -> None:
        start = case.fifo_layers or 0
        base = find_cost(case.model.cost)
        self.cost = PieCost(base, case.model, case.link, start)
        settings = PolicySettings(
            max_batch_sequences=case.max_batch_sequences, token_budget=case.token_budget, start_tokens=1 << 30
        )
        setup = Setup(
            policy=case.policy,
            shape=WorkerShape(case.block_tokens, case.blocks(start)),
            settings=settings,
            cost=self.cost,
            predictor=find_predictor("none", seed=0, train=[]),
        )
        super().__init__(setup, requests)
        self.lengths = [(0.0, start)]
        self._case, self._wanted, self._window_s, self._most_used = case, start, 0.0, 0
        self._plans_since = 0
        """Stretches ended since the last change; plans made before it may still be running."""
        most = most_fifo_layers(case.model.layers)
        self._controller: ExpansionController | None = None
        if case.fifo_layers is None:
            self._controller = ExpansionController(case.model.layers, most)

    def finish(self) -> PieOutcome:
        """Run to the end and return the outcome."""
        outcome = self.run()
        share = self.cost.stall_s / self.cost.compute_s if self.cost.compute_s else 0.0
        return PieOutcome(outcome, share, self.lengths)

    def _on_stretch_end(self, index: int, serial: int) -> None:
        worker = self._workers[index]
        self._most_used = max(self._most_used, worker.books.allocated_blocks)
        super()._on_stretch_end(index, serial)
        if self._controller is None:
            return
        self._plans_since += 1
        self._shrink_when_drained()
        if self.cost.iterations >= WINDOW_ITERATIONS:
            self._judge(self._controller)

    def _judge(self, controller: ExpansionController) -> None:
        now_s = self._events.now_s
        capacity = self._case.blocks(self._wanted)
        window = self.cost.close_window(now_s - self._window_s, capacity, min(capacity, self._most_used))
        self._window_s, self._most_used = now_s, 0
        wanted = controller.on_window(window, is_resizing=self._wanted != self.cost.fifo_layers)
        if wanted == self._wanted:
            return
        is_growing = wanted > self._wanted
        self._wanted = wanted
        self.lengths.append((now_s, wanted))
        self._plans_since = 0
        if is_growing:
            self.cost.fifo_layers = wanted
            self._recut(wanted)
        self._workers[0].policy.on_resized(self._case.blocks(wanted), now_s)

    def _shrink_when_drained(self) -> None:
        is_shrinking = (
            self._wanted < self.cost.fifo_layers and self._plans_since > self._setup.outstanding_steps
        )
        if is_shrinking and self._workers[0].books.allocated_blocks <= self._case.blocks(self._wanted):
            self.cost.fifo_layers = self._wanted
            self._recut(self._wanted)

    def _recut(self, fifo_layers: int) -> None:
        books = self._workers[0].books
        books.shape = WorkerShape(self._case.block_tokens, self._case.blocks(fifo_layers))
