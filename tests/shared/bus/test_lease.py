"""Leases on a real JetStream bucket, in the memory of its server."""

import asyncio
import time

import nats
import pytest
from nats.js.api import StorageType
from prometheus_client import CollectorRegistry

from shared import errors, subjects
from shared.bus import Bus, Lease
from shared.bus.departures import GRACE_S, BusAdvisory, BusClient, connection_name
from shared.bus.lease import LeaseHolder, Silence, _is_takeable
from shared.config import BusConfig
from tests.conftest import ConnectBus, MakeServer
from tests.nats_server import NatsServer
from tests.patience import PATIENCE_S, until

ROLE = "scheduler"


async def acquired(bus: Bus, ttl_s: float = 60.0) -> Lease:
    async with asyncio.timeout(20):
        return await bus.acquire_lease(ROLE, ttl_s=ttl_s)


async def test_one_of_two_contenders_gets_it(connect_bus: ConnectBus) -> None:
    buses = [await connect_bus("scheduler", f"scheduler-{index}") for index in (0, 1)]
    waiting = {asyncio.create_task(acquired(bus)) for bus in buses}
    done, pending = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    later, _ = await asyncio.wait(pending, timeout=0.5)
    assert len(done) == 1 and not later
    lease = done.pop().result()
    assert lease.holder.instance in {"scheduler-0", "scheduler-1"}
    await lease.renew()
    for task in pending:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_silent_holder_is_replaced_and_learns_it(connect_bus: ConnectBus) -> None:
    first, second = [await connect_bus("scheduler", f"scheduler-{index}") for index in (0, 1)]
    lease = await acquired(first)
    await lease.renew()
    started_s = time.monotonic()
    taken = await acquired(second, ttl_s=0.4)
    assert time.monotonic() - started_s >= 0.4 and taken.epoch > lease.epoch
    with pytest.raises(errors.NotLeader, match="scheduler-1"):
        await lease.renew()
    await taken.renew()


async def test_a_holder_that_renews_is_not_replaced(connect_bus: ConnectBus) -> None:
    first, second = [await connect_bus("scheduler", f"scheduler-{index}") for index in (0, 1)]
    lease = await acquired(first)
    waiting = asyncio.create_task(acquired(second, ttl_s=1.0))
    for _ in range(14):
        await asyncio.sleep(0.1)
        await lease.renew()
    assert not waiting.done() and lease.epoch < lease._revision and (await waiting).epoch > lease._revision


async def test_a_restart_of_the_same_instance_waits_for_nothing(connect_bus: ConnectBus) -> None:
    before = await acquired(await connect_bus("scheduler", "scheduler-0"))
    async with asyncio.timeout(PATIENCE_S):
        after = await acquired(await connect_bus("scheduler", "scheduler-0"), ttl_s=3600)
    assert after.epoch > before.epoch and after.holder.incarnation != before.holder.incarnation
    with pytest.raises(errors.NotLeader):
        await before.renew()


async def test_the_role_of_who_has_left_the_bus_is_free(connect_bus: ConnectBus) -> None:
    first, second = [await connect_bus("scheduler", f"scheduler-{index}") for index in (0, 1)]
    lease = await acquired(first)
    second.departures.on_disconnected(BusAdvisory(BusClient(first.instance, f"{first.instance}/1/1")))
    client = BusClient(first.instance, connection_name(first.instance, first.incarnation))
    waiting = asyncio.create_task(acquired(second, ttl_s=3600))
    await asyncio.sleep(3 * GRACE_S)
    assert not waiting.done(), "another start of it has left"
    second.departures.on_disconnected(BusAdvisory(client))
    async with asyncio.timeout(PATIENCE_S):
        assert (await waiting).epoch > lease.epoch


async def test_a_role_given_back_is_free_at_once(connect_bus: ConnectBus) -> None:
    lease = await acquired(await connect_bus("scheduler", "scheduler-0"))
    await lease.release()
    async with asyncio.timeout(PATIENCE_S):
        taken = await acquired(await connect_bus("scheduler", "scheduler-1"), ttl_s=3600)
    assert taken.epoch > lease.epoch
    await lease.release()  # of what is another's by now: changes nothing
    await taken.renew()


async def test_epochs_grow_over_kills_of_the_server(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    bus = await connect_bus("scheduler", "scheduler-0")
    lease = await acquired(bus)
    epochs = [lease.epoch]
    for index in (1, 2):
        nats_server.kill()
        nats_server.start()
        await until(lambda: bus.connected)
        await renewed(lease)
        lease = await acquired(await connect_bus("scheduler", f"scheduler-{index}"), ttl_s=0.2)
        epochs.append(lease.epoch)
    assert epochs == sorted(set(epochs))


async def renewed(lease: Lease) -> None:
    """JetStream may need a moment after a restart."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await lease.renew()
            except errors.UnavailableError as error:
                assert not isinstance(error, errors.NotLeader)
                await asyncio.sleep(0.05)


async def test_the_bucket_needs_no_disk(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    await acquired(await connect_bus("scheduler", "scheduler-0"))
    tool = await nats.connect(nats_server.url)
    status = await (await tool.jetstream().key_value(subjects.LEASE_BUCKET)).status()
    assert status.stream_info.config.storage == StorageType.MEMORY
    await tool.close()


async def test_no_epoch_is_given_twice_though_every_server_forgets(
    connect_bus: ConnectBus, nats_server: NatsServer
) -> None:
    """Each server that dies takes the leases with it; contenders and holders meet an empty bucket."""
    given: list[int] = []
    for index in range(4):
        buses = [await connect_bus("scheduler", f"scheduler-{index}-{each}") for each in (0, 1)]
        first = await acquired(buses[0], ttl_s=0.2)
        waiting = asyncio.create_task(acquired(buses[1], ttl_s=0.4))
        await asyncio.sleep(0.1)
        nats_server.kill()
        nats_server.start()
        await until(lambda buses=buses: all(bus.connected for bus in buses))  # type: ignore[misc]
        given += [first.epoch, (await waiting).epoch]
        with pytest.raises(errors.NotLeader, match=f"scheduler-{index}-1"):
            await first.renew()
    assert given == sorted(set(given))


async def test_time_of_a_blind_observer_is_not_silence(
    connect_bus: ConnectBus, nats_server: NatsServer
) -> None:
    lease = await acquired(await connect_bus("scheduler", "scheduler-0"))
    standby = await connect_bus("scheduler", "scheduler-1")
    waiting = asyncio.create_task(acquired(standby, ttl_s=1.0))
    await asyncio.sleep(0.3)
    nats_server.kill()
    await asyncio.sleep(1.2)  # longer than the time to live
    nats_server.start()
    await until(lambda: standby.connected)
    await renewed(lease)
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await waiting


async def test_a_renewal_whose_answer_was_lost_is_not_a_lost_lease(connect_bus: ConnectBus) -> None:
    lease = await acquired(await connect_bus("scheduler", "scheduler-0"))
    revision = lease._revision
    await lease.renew()
    lease._revision = revision  # as if the answer had never come
    await lease.renew()
    assert lease._revision == revision + 2


async def test_a_holder_goes_on_in_a_new_bucket(connect_bus: ConnectBus, nats_server: NatsServer) -> None:
    bus = await connect_bus("scheduler", "scheduler-0")
    lease = await acquired(bus)
    tool = await nats.connect(nats_server.url)
    await tool.jetstream().delete_key_value(subjects.LEASE_BUCKET)
    await tool.close()
    await lease.renew()
    await lease.renew()
    other = await acquired(await connect_bus("scheduler", "scheduler-1"), ttl_s=0.2)
    assert other.epoch > lease._revision > lease.epoch
    with pytest.raises(errors.NotLeader, match="scheduler-1"):
        await lease.renew()


async def test_without_jetstream_the_standby_waits_and_the_log_says_why(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(jetstream=False).start()
    bus = await Bus.connect(
        BusConfig(url=server.url), service="scheduler", instance="scheduler-0", registry=CollectorRegistry()
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await bus.acquire_lease(ROLE, ttl_s=1)
    assert "is it enabled in nats-server?" in caplog.text
    await bus.close()


@pytest.mark.parametrize(
    ("held_by", "to_a_new_process", "to_one_that_stood_before"),
    [
        (LeaseHolder(instance="", incarnation=0), True, True),
        (LeaseHolder(instance="a", incarnation=5), True, True),
        (LeaseHolder(instance="a", incarnation=4), True, False),  # a start of ours: the one before, or after
        (LeaseHolder(instance="b", incarnation=4), False, False),
    ],
)
def test_who_yields(held_by: LeaseHolder, to_a_new_process: bool, to_one_that_stood_before: bool) -> None:
    own = LeaseHolder(instance="a", incarnation=5)
    assert _is_takeable(held_by, own, is_new=True) is to_a_new_process
    assert _is_takeable(held_by, own, is_new=False) is to_one_that_stood_before


def test_only_what_was_watched_counts_as_silence() -> None:
    silence = Silence(longest_gap_s=0.5)
    for now_s in (10.0, 10.2, 10.6):
        silence.observe(7, 0, now_s)
    assert silence.lasting_s == pytest.approx(0.6)
    silence.observe(7, 0, 99.0)  # the observer was frozen
    assert silence.lasting_s == pytest.approx(1.1)
    silence.observe(8, 0, 99.1)
    assert silence.lasting_s == 0.0
    silence.observe(8, 0, 99.4)
    silence.observe(8, 1, 99.5)  # the connection was lost in between
    assert silence.lasting_s == 0.0
