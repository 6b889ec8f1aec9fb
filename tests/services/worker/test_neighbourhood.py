"""What a worker sets aside for its neighbours' blocks, and the context that it announces with theirs. The
rest is seen live (`tests/stack`)."""

from collections import OrderedDict
from typing import Any, cast

from services.worker.building import staged_blocks
from services.worker.config import WorkerConfig
from services.worker.core.settings import LendingConfig
from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.kv.transfers import TransferEngine
from services.worker.neighbourhood import Neighbourhood, Reach
from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.plane import make_transports
from shared.clock import monotonic_s
from shared.messages.lending import KvTier
from tests.conftest import ConnectBus
from tests.services.worker.peers.attention.rig import make_engine
from tests.shared.messages.builders import worker_report


def test_stagings_are_paid_for_in_own_blocks() -> None:
    config = LendingConfig(borrow=True, staging_blocks=2, most_creditors=8)
    assert staged_blocks(config, layers=8) == 4
    assert staged_blocks(config, layers=3) == 11
    for borrow in (False, "auto"):
        assert staged_blocks(config.model_copy(update={"borrow": borrow}), layers=8) == 0


async def test_what_a_debtor_without_a_grant_described_is_forgotten_with_the_next_heartbeat(
    connect_bus: ConnectBus, llama: Any
) -> None:
    """Nobody called for it: a creditor kept the steps of every life of every debtor."""
    bus = await connect_bus("worker", "w")
    engine = make_engine(llama, 8)
    config, pool = WorkerConfig(model="m"), engine.make_pool()
    transfers = TransferEngine(lambda: None)
    here = Neighbourhood(
        bus,
        config,
        engine,
        pool,
        pool,
        Door(cast(StepCore, None), monotonic_s, lambda effects: None),
        Registry(bus, "host", make_transports(config.bulk), 1.0, monotonic_s),
        transfers,
        clock=monotonic_s,
    )
    creditor = here._creditor
    assert creditor is not None
    creditor._described[Peer("gone", 1), KvTier.DEVICE] = OrderedDict()
    here.section(worker_report("w").capacity)
    assert not creditor._described
    assert transfers.halt(5.0)


def test_what_others_lend_counts_and_the_model_has_the_last_word() -> None:
    assert Reach(640, 10_000).context_tokens(0, 0.0) == 640
    assert Reach(640, 10_000).context_tokens(50 * 16, 0.0) == 640 + 50 * 16
    assert Reach(640, 1000).context_tokens(640, 0.0) == 1000


def test_a_restart_refuses_nobody_and_a_worker_that_stays_away_counts_no_more() -> None:
    reach = Reach(640, 10_000)
    assert reach.context_tokens(640, 0.0) == 1280
    assert reach.context_tokens(0, 20.0) == 1280, "silent for a while"
    assert reach.context_tokens(0, 40.0) == 640
    assert reach.context_tokens(640, 41.0) == 1280
