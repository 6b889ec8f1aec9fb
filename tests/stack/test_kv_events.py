"""A ZMQ subscriber of vLLM's kind reads what a stack's workers have cached, and asks for what it missed."""

import asyncio
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from services.stack.obstructions import free_port
from services.worker.kv.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack, running_stack

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install -r deploy/locks/kv-events.txt")
pytestmark = pytest.mark.stack
BATCHES = msgspec.msgpack.Decoder(EventBatch)


def free_ports(count: int) -> int:
    """The first of so many in a row, which nobody else is given."""
    ports = [free_port() for _ in range(count)]
    while ports[-1] - ports[0] != count - 1:
        ports = [*ports[1:], free_port()]
    return ports[0]


@pytest.fixture(scope="module")
def port() -> int:
    """Where the first worker's events are; the second's follow, then where both replay theirs."""
    return free_ports(4)


@pytest.fixture(scope="module")
def stack(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    settings = (
        "worker.kv_blocks=64",
        f"worker.kv_events.endpoint=tcp://127.0.0.1:{port}",
        f"worker.kv_events.replay_endpoint=tcp://127.0.0.1:{port + 2}",
        "worker.kv_events.topic=kv-events",
    )
    with running_stack(tmp_path_factory.mktemp("kv-events") / "run", settings=settings) as running:
        yield running


def replayed(port: int, first: int = 0) -> list[tuple[int, EventBatch]]:
    """What a worker that replays there still has from `first` on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.connect(f"tcp://127.0.0.1:{port}")
        asking.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            _, seq, payload = asking.recv_multipart()
            if int.from_bytes(seq, "big", signed=True) < 0:
                break
            found.append((int.from_bytes(seq, "big"), BATCHES.decode(payload)))
    return found


async def test_a_subscriber_hears_of_every_block(stack: RunningStack, port: int) -> None:
    heard: list[tuple[int, int, EventBatch]] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as reading:
        reading.setsockopt(zmq.LINGER, 0)
        for number in (0, 1):
            reading.connect(f"tcp://127.0.0.1:{port + number}")
        reading.subscribe("kv-events")
        await asyncio.sleep(0.5)
        prompts = mixed(12, longest_words=150, seed=4)
        answers = await stack.client().ask_all([Question(prompt, {"max_tokens": 40}) for prompt in prompts])
        assert all(answer.complete for answer in answers)
        await asyncio.sleep(0.5)
        while reading.poll(200):
            topic, seq, payload = reading.recv_multipart()
            assert topic == b"kv-events"
            batch = BATCHES.decode(payload)
            assert batch.data_parallel_rank in (0, 1)
            heard.append((batch.data_parallel_rank or 0, int.from_bytes(seq, "big"), batch))
    events = [event for _, _, batch in heard for event in batch.events]
    assert any(isinstance(event, BlockStored) for event in events)
    for number in (0, 1):
        mine = [(seq, batch) for rank, seq, batch in heard if rank == number]
        assert [seq for seq, _ in mine] == [*range(mine[0][0], mine[0][0] + len(mine))]
        assert replayed(port + 2 + number, mine[0][0])[: len(mine)] == mine


async def test_the_tokens_are_those_of_the_prompt(stack: RunningStack, port: int) -> None:
    prompt = " ".join(f"word{index}" for index in range(60))
    await stack.client().ask_all([Question(prompt, {"max_tokens": 4})])
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
        reply = await http.post(
            "/tokenize",
            json={"model": stack.model.name, "messages": [{"role": "user", "content": prompt}]},
            headers={"Authorization": f"Bearer {stack.key}"},
        )
    tokens = reply.json()["tokens"]
    await asyncio.sleep(0.5)
    chains = [chain for number in (0, 1) for chain in stored(port + 2 + number)]
    size = 16
    whole = tokens[: len(tokens) // size * size]
    assert whole and any(chain[: len(whole)] == whole for chain in chains)


def stored(port: int) -> list[list[int]]:
    """Tokens of every block that a worker has, with all before it, as a reader of its events has them."""
    chains: dict[bytes, list[int]] = {}
    there: set[tuple[str | None, bytes]] = set()
    batches = replayed(port)
    assert isinstance(batches[0][1].events[0], AllBlocksCleared)
    for _, batch in batches:
        for event in batch.events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for at, name in enumerate(event.block_hashes):
                    before = chains.get(parent, []) if parent is not None else []
                    size = event.block_size
                    chains[name] = [*before, *event.token_ids[at * size : (at + 1) * size]]
                    parent = name
                    there.add((event.medium, name))
            elif isinstance(event, BlockRemoved):
                there -= {(event.medium, name) for name in event.block_hashes}
    names = {name for _, name in there}
    return [chain for name, chain in chains.items() if name in names]
