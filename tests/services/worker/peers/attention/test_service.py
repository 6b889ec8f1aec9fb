"""What a worker sets aside for its neighbours' blocks. The rest is seen live (`tests/stack`)."""

from collections import OrderedDict
from typing import cast

from services.worker.config import WorkerConfig
from services.worker.engine_thread import Runner
from services.worker.neighbourhood import Neighbourhood, staged_blocks
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.transport.base import Peer
from shared.clock import monotonic_s
from shared.messages.lending import KvTier
from tests.conftest import ConnectBus
from tests.services.worker.conftest import ModelFactory
from tests.services.worker.peers.attention.rig import make_engine
from tests.shared.messages.builders import worker_report


def test_stagings_are_paid_for_in_own_blocks() -> None:
    config = LendingConfig(borrow=True, staging_blocks=2, most_creditors=8)
    assert staged_blocks(config, layers=8) == 4
    assert staged_blocks(config, layers=3) == 11
    assert staged_blocks(config.model_copy(update={"borrow": False}), layers=8) == 0


async def test_what_a_debtor_without_a_grant_described_is_forgotten_with_the_next_heartbeat(
    connect_bus: ConnectBus, make_model: ModelFactory
) -> None:
    """Nobody called for it: a creditor kept the steps of every life of every debtor."""
    bus = await connect_bus("worker", "w")
    engine = make_engine(make_model("llama"), 8)
    here = Neighbourhood(bus, WorkerConfig(model="m"), engine, engine.make_pool(), monotonic_s)
    here.attach(cast(Runner, None), engine.make_pool(), engine.fingerprint)
    creditor = here._creditor
    assert creditor is not None
    creditor._described[Peer("gone", 1), KvTier.DEVICE] = OrderedDict()
    here.section(worker_report("w").capacity)
    assert not creditor._described
