"""The generated configuration, judged by the real server.

The permission table, subject by subject, against nats-server on the generated configuration.
"""

import asyncio
import importlib
import importlib.util
import pkgutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StorageType
from prometheus_client import CollectorRegistry

from services.stack import nats_server
from services.stack.access import BusAccess, certificate_for
from services.stack.authority import make_certificate
from services.stack.config import StackConfig
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.bus import Bus, Endpoint, Listener, connection
from shared.bus.serving import Handler, subject_for
from shared.config import BusConfig
from shared.errors import BusUnavailable, ConfigError, MessageTooLarge, NoResponder, PermissionRefused
from shared.messages.base import Empty
from shared.messages.reports import ServiceStatus
from shared.subjects import LEASE_BUCKET, OPERATOR, SCHEDULER_ANNOUNCED, permissions_of
from tests.patience import PATIENCE_S, until
from tests.services.stack.secured import secured_server


async def connect(config: BusConfig, user: str) -> Bus:
    service = user.partition("-")[0]
    return await Bus.connect(config, service=service, instance=user, registry=CollectorRegistry())


def test_the_file_is_checked_and_private(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / 'a "rün"')
    run.create()
    path, store = run.path / "nats.conf", run.path / "nats"
    access = BusAccess.to([4222], run.credentials(), None)
    nats_server.write_config(path, StackConfig(), access, store)
    assert path.stat().st_mode & 0o077 == 0
    make_certificate(tmp_path / "tls")
    (tmp_path / "tls" / "server-key.pem").write_text("no key")
    config = StackConfig(
        nats_tls_cert=tmp_path / "tls" / "server.pem", nats_tls_key=tmp_path / "tls" / "server-key.pem"
    )
    with pytest.raises(ConfigError, match=r"does not accept .*nats\.conf"):
        unusable = certificate_for(config, tmp_path)
        nats_server.write_config(path, config, BusAccess.to([4222], run.credentials(), unusable), store)


@pytest.mark.parametrize("tls", [False, True])
async def test_no_password_no_entry(tmp_path: Path, tls: bool) -> None:
    async with secured_server(tmp_path, StackConfig(tls=tls)) as access:
        insider = access.config("scheduler-0", connect_timeout_s=10.0)
        bus = await connect(insider, "scheduler-0")
        assert bus.connected
        await bus.close()
        for stranger in (
            {"user": None, "password": None},
            {"user": "worker-0"},
            {"user": "kvasir"},
            {"user": "admin", "password": None},
        ):
            config = insider.model_copy(update={**stranger, "connect_timeout_s": 0.4})
            with pytest.raises(BusUnavailable, match="no NATS connection"):
                await connect(config, "scheduler-0")


async def test_tls_lets_nobody_in_without_it(tmp_path: Path) -> None:
    async with secured_server(tmp_path, StackConfig(tls=True)) as access:
        assert access.url.startswith("tls://")
        plain = access.config("scheduler-0", connect_timeout_s=0.4).model_copy(
            update={"url": access.url.replace("tls://", "nats://"), "tls_ca": None}
        )
        with pytest.raises(BusUnavailable):
            await connect(plain, "scheduler-0")


async def test_limits_are_those_of_the_settings(tmp_path: Path) -> None:
    config = StackConfig(nats_max_payload_bytes=64 * 1024, nats_max_connections=16)
    async with secured_server(tmp_path, config) as access:
        buses = [await connect(access.config("scheduler-0"), "scheduler-0") for _ in range(16)]
        with pytest.raises(BusUnavailable, match="no NATS connection"):
            await connect(access.config("scheduler-0", connect_timeout_s=0.5), "scheduler-0")
        status = ServiceStatus(
            service="x", instance="x-0", incarnation=1, uptime_s=1.0, details={"x": "x" * 70_000}
        )
        with pytest.raises(MessageTooLarge):
            await buses[0].publish(SCHEDULER_ANNOUNCED, status)
        await buses.pop().close()
        buses.append(await connect(access.config("scheduler-0"), "scheduler-0"))
        for bus in buses:
            await bus.close()


async def test_the_lease_is_the_only_stream(tmp_path: Path) -> None:
    async with secured_server(tmp_path) as access:
        bus = await connect(access.config("scheduler-0"), "scheduler-0")
        async with asyncio.timeout(PATIENCE_S):
            await bus.acquire_lease("scheduler", ttl_s=1.0)
        context = bus._link.client.jetstream(timeout=0.5)
        with pytest.raises((nats.errors.TimeoutError, nats.js.errors.APIError)):
            await context.create_key_value(bucket=f"{LEASE_BUCKET}2", storage=StorageType.FILE)
        await bus.close()


USERS = (*StackConfig().instances, "gateway-1", OPERATOR)
PERMISSIONS = {user: permissions_of(user) for user in USERS}
PROMPTLY_S = PATIENCE_S / 2
"""Half of every deadline here: what takes less was said, not given up."""

UNIVERSE = sorted(
    {
        pattern.replace("*", name).replace(">", "a.b")
        for permissions in PERMISSIONS.values()
        for pattern in (*permissions.publish, *permissions.subscribe)
        for name in ("x-0", "worker-1", "gateway-0")
    }
    | {
        "kvasir.v1.evt.nobody.knows",
        "_INBOX.anybody.1",
        "$JS.API.STREAM.LIST",
        "$JS.API.STREAM.DELETE.KV_kvasir_leases",
        "$JS.API.CONSUMER.CREATE.KV_kvasir_leases",
        "$KV.other.scheduler",
        "$SYS.REQ.SERVER.PING",
    }
)

WIDE = (">", "kvasir.>", "kvasir.v1.*.*.*", "_INBOX.>", "$KV.>")
ConnectUser = Callable[[str], Awaitable[Bus]]


def covers(pattern: str, subject: str) -> bool:
    """Whether NATS would let a permission for `pattern` stand for `subject`."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return given[: len(wanted) - 1] == wanted[:-1] and len(given) >= len(wanted)
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))


def allowed(patterns: tuple[str, ...], subject: str) -> bool:
    return any(covers(pattern, subject) for pattern in patterns)


class Ear:
    """Hears."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()

    def hear(self, message: Empty) -> None:
        self.heard.set()


@pytest_asyncio.fixture
async def access(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BusAccess]:
    async with secured_server(tmp_path_factory.mktemp("secured"), users=USERS[:-1]) as found:
        yield found


@pytest_asyncio.fixture
async def connect_user(access: BusAccess) -> AsyncIterator[ConnectUser]:
    opened: list[Bus] = []

    async def connect_user(user: str) -> Bus:
        config = access.config(user, connect_timeout_s=15.0, drain_timeout_s=0.5)
        registry = CollectorRegistry()
        service = user.partition("-")[0]
        opened.append(await Bus.connect(config, service=service, instance=user, registry=registry))
        return opened[-1]

    yield connect_user
    for bus in opened:
        await bus.close()


async def outcome(attempt: Awaitable[object]) -> bool:
    """Whether it was let through; a refusal must come promptly."""
    started_s = time.monotonic()
    try:
        await attempt
    except PermissionRefused:
        return False
    finally:
        assert time.monotonic() - started_s < PROMPTLY_S
    return True


@pytest.mark.parametrize("user", USERS)
async def test_what_a_user_may_do_is_as_in_the_table(
    connect_user: ConnectUser, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish, ask (which is refused like an event) and subscribe, subject by subject."""
    monkeypatch.setattr(connection, "_VERDICT_S", PATIENCE_S)
    bus, permissions = await connect_user(user), PERMISSIONS[user]
    let_through = [s for s in UNIVERSE if await outcome(bus.publish(s, Empty()))]
    assert let_through == [s for s in UNIVERSE if allowed(permissions.publish, s)]
    for subject in (s for s in UNIVERSE if s.startswith("kvasir.")):
        started_s = time.monotonic()
        expected = NoResponder if allowed(permissions.publish, subject) else PermissionRefused
        with pytest.raises(expected):
            await bus.request(subject, Empty(), Empty, deadline_s=PATIENCE_S)
        assert time.monotonic() - started_s < PROMPTLY_S
        if expected is PermissionRefused:
            with pytest.raises(PermissionRefused):
                await bus.gather(subject, Empty(), Empty, deadline_s=20.0)
    tried = [*UNIVERSE, *(pattern for pattern in WIDE if pattern not in UNIVERSE)]
    let_through = [s for s in tried if await outcome(bus.attach([Listener(s, Empty, "hear")], Ear()))]
    assert let_through == [s for s in tried if allowed(permissions.subscribe, s)]


async def test_what_is_sent_arrives_at_all_who_may_hear_it(connect_user: ConnectUser) -> None:
    buses = {user: await connect_user(user) for user in USERS}
    for subject in (s for s in UNIVERSE if s.startswith("kvasir.")):
        hearers = [user for user in USERS if allowed(PERMISSIONS[user].subscribe, subject)]
        ears = [Ear() for _ in hearers]
        listener = Listener(subject, Empty, "hear")
        for hearer, ear in zip(hearers, ears, strict=True):
            await buses[hearer].attach([listener], ear)
        for sender in (user for user in USERS if allowed(PERMISSIONS[user].publish, subject)):
            await buses[sender].publish(subject, Empty())
            async with asyncio.timeout(PATIENCE_S):
                for ear in ears:
                    await ear.heard.wait()
                    ear.heard.clear()


@pytest.mark.parametrize("user", USERS)
async def test_the_lease_is_the_schedulers(connect_user: ConnectUser, user: str) -> None:
    bus = await connect_user(user)
    if user != "scheduler-0":
        assert not await outcome(bus.acquire_lease("scheduler", ttl_s=1.0))
        return
    async with asyncio.timeout(PATIENCE_S):
        lease = await bus.acquire_lease("scheduler", ttl_s=1.0)
        await lease.renew()
        await lease.release()
        assert (await bus.acquire_lease("scheduler", ttl_s=1.0)).epoch > lease.epoch
    assert not await outcome(bus.acquire_lease("gateway", ttl_s=1.0))


async def raw(access: BusAccess, user: str, errors: list[str]) -> Client:
    """A client without the bus around it, as an intruder with that user's password would use."""

    async def note(error: Exception) -> None:
        errors.append(str(error))

    return await nats.connect(
        access.url, user=user, password=access.credentials.nats_passwords[user], error_cb=note
    )


async def test_the_asked_may_answer_once_and_nobody_else_at_all(access: BusAccess) -> None:
    errors: list[str] = []
    gateway, scheduler, worker = [
        await raw(access, user, errors) for user in ("gateway-0", "scheduler-0", "worker-0")
    ]
    answers: list[bytes] = []
    asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_answer(msg: Msg) -> None:
        answers.append(msg.data)

    async def on_question(msg: Msg) -> None:
        asked.set_result(msg.reply)

    inbox = f"{subjects.inbox_prefix('gateway-0')}.7.1"
    await gateway.subscribe(inbox, cb=on_answer)
    await gateway.flush()
    await scheduler.subscribe(subjects.scheduler_submit("gateway-0"), cb=on_question)
    await scheduler.flush()
    await gateway.publish(subjects.scheduler_submit("gateway-0"), b"?", reply=inbox)
    await until(lambda: asked.done() or bool(errors))
    assert not errors
    reply = asked.result()
    for client, answer in ((worker, b"forged"), (scheduler, b"true"), (scheduler, b"again")):
        await client.publish(reply, answer)
        await client.flush()
    await gateway.flush()
    assert answers == [b"true"]
    await until(lambda: len(errors) >= 2)
    assert len(errors) == 2
    for client in (gateway, scheduler, worker):
        await client.close()


async def test_the_operator_discovers_services(access: BusAccess, connect_user: ConnectUser) -> None:
    class Desk:
        async def status(self, _: Empty) -> Empty:
            return Empty()

    for service in subjects.SERVICES:
        bus = await connect_user(f"{service}-0")
        await bus.attach([Endpoint(subjects.status(service), Empty, "status")], Desk())
    errors: list[str] = []
    operator, found = await raw(access, OPERATOR, errors), set[str]()

    async def on_pong(msg: Msg) -> None:
        found.update(s for s in subjects.SERVICES if f'"{subjects.micro_name(s)}"'.encode() in msg.data)

    inbox = f"{subjects.inbox_prefix(OPERATOR)}.1"
    await operator.subscribe(inbox, cb=on_pong)
    await operator.publish("$SRV.PING", b"", reply=inbox)
    await until(lambda: found == set(subjects.SERVICES))
    assert errors == []
    await operator.close()


OTHERS = {
    "reads its prompts": ("subscribe", subjects.worker_plan("worker-0")),
    "reads all prompts": ("subscribe", "kvasir.v1.cmd.worker.plan.*"),
    "takes what is meant for it": ("subscribe", subjects.worker_dial.to("worker-0")),
    "listens to its inbox": ("subscribe", f"{subjects.inbox_prefix('worker-0')}.>"),
    "listens to every inbox": ("subscribe", "*.>"),
    "reads the answers": ("subscribe", subjects.tokens.to("gateway-0")),
    "answers in its name": ("publish", subjects.tokens("gateway-0", "worker-0")),
    "reports in its name": ("publish", subjects.worker_reported("worker-0")),
    "ends its sequences": ("publish", subjects.worker_stepped("worker-0")),
    "empties its cache": ("publish", subjects.worker_cached("worker-0")),
    "takes a ticket in its name": ("publish", subjects.worker_dial("worker-9", "worker-0")),
    "borrows in its name": ("publish", subjects.worker_borrow("worker-9", "worker-0")),
    "renews in its name": ("publish", subjects.worker_renew("worker-9", "worker-0")),
    "repays in its name": ("publish", subjects.worker_repay("worker-9", "worker-0")),
    "asks the ledger in its name": ("publish", subjects.ledger_candidates("worker-0")),
    "tells it what to compute": ("publish", subjects.worker_plan("worker-0")),
    "fetches what it computed": ("publish", subjects.worker_fetch("worker-0", "gateway-0")),
    "submits as a gateway": ("publish", subjects.scheduler_submit("gateway-0")),
}


async def managed(bus: Bus, attempts: Mapping[str, tuple[str, str]]) -> list[str]:
    """Those of the attempts, each a verb and a subject, that the server let through."""
    done = []
    for what, (verb, subject) in attempts.items():
        hears = [Listener(subject, Empty, "hear")]
        tried = bus.attach(hears, Ear()) if verb == "subscribe" else bus.publish(subject, Empty())
        done += [what] if await outcome(tried) else []
    return done


async def test_a_worker_can_do_nothing_with_another_worker_s_name(connect_user: ConnectUser) -> None:
    """One compromised worker reads no prompt, and forges no answer, of another. Spelt out, so that whoever
    widens the table sees what that would allow."""
    assert await managed(await connect_user("worker-1"), OTHERS) == []


ANOTHERS = {
    "fetches what its clients are told": ("publish", subjects.worker_fetch("worker-0", "gateway-0")),
    "ends its answers": ("publish", subjects.worker_cancel("worker-0", "gateway-0")),
    "ends its answers at the scheduler": ("publish", subjects.scheduler_cancel("gateway-0")),
    "ends them in the scheduler's name": ("publish", subjects.worker_cancel("worker-0", "scheduler-0")),
    "writes into its answers": ("publish", subjects.worker_extend("worker-0", "gateway-0")),
    "has its answers forgotten": ("publish", subjects.worker_acknowledge("worker-0", "gateway-0")),
    "says nothing of who it is": ("publish", "kvasir.v1.cmd.worker.fetch.worker-0"),
    "submits in its name": ("publish", subjects.scheduler_submit("gateway-0")),
    "reports in its name": ("publish", subjects.gateway_reported("gateway-0")),
    "reads its answers": ("subscribe", subjects.tokens.to("gateway-0")),
    "reads who asks for what": ("subscribe", subjects.worker_fetch.to("worker-0")),
    "reads what it cancels": ("subscribe", subjects.scheduler_cancel("gateway-0")),
    "reads its prompts": ("subscribe", subjects.scheduler_submit("gateway-0")),
}


async def test_a_gateway_can_do_nothing_in_another_gateway_s_name(connect_user: ConnectUser) -> None:
    assert await managed(await connect_user("gateway-1"), ANOTHERS) == []


def handler_tables(service: str) -> list[Handler]:
    package = importlib.import_module(f"services.{service}")
    names = [one.name for one in pkgutil.walk_packages(package.__path__, f"services.{service}.")]
    modules = [importlib.import_module(name) for name in names if "HANDLERS" in source(name)]
    return [handler for module in modules for handler in getattr(module, "HANDLERS", ())]


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text() if spec.origin.endswith(".py") else ""


@pytest.mark.parametrize("service", subjects.SERVICES)
def test_handlers_are_within_the_table_and_check_who_sends(service: str) -> None:
    tables = handler_tables(service)
    assert tables
    for handler in tables:
        assert isinstance(handler, Endpoint | Listener)
        subject = subject_for(handler.subject, f"{service}-0")
        assert allowed(PERMISSIONS[f"{service}-0"].subscribe, subject), subject
        if subject.endswith(".*"):
            assert handler.sender, f"{subject}: from whom?"
