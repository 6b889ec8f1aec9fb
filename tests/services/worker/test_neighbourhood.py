"""What a worker sets aside for its neighbours' blocks, and the context that it announces with theirs. The
rest is seen live (`tests/stack`)."""

from collections import OrderedDict
from typing import Any, cast

from services.worker.config import WorkerConfig
from services.worker.engine_thread import Runner
from services.worker.neighbourhood import Neighbourhood, Reach, staged_blocks
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.transport.base import Peer
from shared.clock import monotonic_s
from shared.messages.lending import KvTier
from shared.messages.reports import WorkerReported
from tests.conftest import ConnectBus
from tests.services.worker.peers.attention.rig import make_engine
from tests.shared.messages.builders import worker_report


def test_stagings_are_paid_for_in_own_blocks() -> None:
    config = LendingConfig(borrow=True, staging_blocks=2, most_creditors=8)
    assert staged_blocks(config, layers=8) == 4
    assert staged_blocks(config, layers=3) == 11
    assert staged_blocks(config.model_copy(update={"borrow": False}), layers=8) == 0


async def test_what_a_debtor_without_a_grant_described_is_forgotten_with_the_next_heartbeat(
    connect_bus: ConnectBus, llama: Any
) -> None:
    """Nobody called for it: a creditor kept the steps of every life of every debtor."""
    bus = await connect_bus("worker", "w")
    engine = make_engine(llama, 8)
    here = Neighbourhood(bus, WorkerConfig(model="m"), engine, engine.make_pool(), monotonic_s)
    here.attach(cast(Runner, None), engine.make_pool(), engine.fingerprint)
    creditor = here._creditor
    assert creditor is not None
    creditor._described[Peer("gone", 1), KvTier.DEVICE] = OrderedDict()
    here.section(worker_report("w").capacity)
    assert not creditor._described


def report(worker_id: str, most_lent: int, model: str = "m") -> WorkerReported:
    return worker_report(worker_id, model=model, total_blocks=40, free_blocks=0, most_lent_blocks=most_lent)


def test_others_of_the_same_model_count_with_what_they_lend_at_most() -> None:
    reach = Reach("w0", "m", 640, 10_000)
    assert reach.context_tokens(0.0) == 640
    for sender in (report("w1", 20), report("w2", 30), report("w3", 9, model="other"), report("w0", 40)):
        reach.on_report(sender, 0.0)
    assert reach.context_tokens(0.0) == 640 + 50 * 16


def test_the_model_has_the_last_word() -> None:
    reach = Reach("w0", "m", 640, 1000)
    reach.on_report(report("w1", 40), 0.0)
    assert reach.context_tokens(0.0) == 1000


def test_a_restart_refuses_nobody_and_a_worker_that_stays_away_counts_no_more() -> None:
    reach = Reach("w0", "m", 640, 10_000)
    reach.on_report(report("w1", 40), 0.0)
    assert reach.context_tokens(0.0) == 1280
    assert reach.context_tokens(20.0) == 1280, "silent for a while"
    assert reach.context_tokens(40.0) == 640
    reach.on_report(report("w1", 40), 41.0)
    assert reach.context_tokens(41.0) == 1280
