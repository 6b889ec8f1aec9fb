"""Rules for every bulk transport, tested against a real process that is killed and stopped."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from services.worker.peers.transport.base import Buffer, Peer, Reception, TransportLimits
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.plane import BulkTransport
from shared import errors
from shared.errors import DeadlineExceeded, InvalidMessage, MessageTooLarge, PeerLost, Unauthorized
from tests.patience import BUSY_S, wait_until
from tests.services.worker.peers.transport.peer import TRANSPORTS, Process
from tests.services.worker.peers.transport.receivers import End, pattern

OWN, ELSE = Peer("worker-own", 3), Peer("worker-else", 1)
LIMITS = TransportLimits(header_bytes=1 << 16, buffers=4096, message_bytes=64 << 20, links=8, idle_s=30.0)
Dial = Callable[[], PeerLink]
MIB = 1 << 20
LARGE_BYTES = 48 * MIB
"""More than any transport buffers between two processes."""
SIZES: list[list[int]] = [[], [0], [1], [7, 0, 4095], [4096, 4097], [16383, 16384], [65536], [65537]]
SIZES += [[MIB - 1, 1, MIB + 3], [5 * MIB, 0, 123], [100] * 3000, [33_000] * 200]


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> BulkTransport:
    try:
        return TRANSPORTS[request.param]()
    except errors.ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture
def end(transport: BulkTransport) -> Iterator[End]:
    made = End(transport, OWN, LIMITS)
    yield made
    assert made.listener.close(10.0)


@pytest.fixture
def process(transport: BulkTransport) -> Iterator[Process]:
    made = Process(transport.name)
    yield made
    made.send_signal(signal.SIGCONT)
    made.end()


@pytest.fixture
def dial(transport: BulkTransport, process: Process) -> Iterator[Dial]:
    """Yield a function that dials the other process, and close its links at the end."""
    made: list[PeerLink] = []

    def make_link() -> PeerLink:
        ticket = process.ticket(OWN)
        made.append(transport.dial(process.address, OWN, process.peer, ticket, deadline_s=10.0))
        return made[-1]

    yield make_link
    for link in made:
        link.close()


def _rests(buffers: list[Buffer]) -> None:
    """Check that nothing writes into the buffers."""
    before = [bytes(buffer) for buffer in buffers]
    time.sleep(0.3)
    assert [bytes(buffer) for buffer in buffers] == before


def _warm(link: PeerLink) -> PeerLink:
    """Send a large message, so that the transport is set up."""
    link.ask("keep", b"", [pattern(MIB)], deadline_s=10.0)
    return link


class Held:
    """A receiver that admits nothing before it is told to."""

    def __init__(self, end: End) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._receiver = end.desk.receiver("keep")
        end.desk.serve({"keep": self})

    def __call__(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        taken = self._receiver(peer, header, sizes_bytes)
        self.reached.set()
        assert self.go_on.wait(30.0)
        return taken


@contextmanager
def _aside(call: Callable[[], object]) -> "Iterator[list[BaseException]]":
    """Run `call` on a thread; yield the errors that it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield raised
    thread.join(30.0)
    assert not thread.is_alive()


class TestMessages:
    def test_arrive_and_come_back_in_all_sizes(self, dial: Dial, process: Process) -> None:
        link = dial()
        for number, sizes in enumerate(SIZES):
            sent: list[Buffer] = [pattern(size, number) for size in sizes]
            into: list[Buffer] = [memoryview(bytearray(size)) for size in sizes]
            answer = link.ask("echo", b"header %d" % number, sent, into=into, deadline_s=20.0)
            assert (answer.header, answer.buffers) == (b"header %d" % number, len(sizes))
            assert into == sent
        assert process.ask("counts") == {"admitted": 12, "committed": 12, "abandoned": 0}

    def test_of_one_link_may_overlap_when_small(self, dial: Dial) -> None:
        link = dial()
        into = [memoryview(bytearray(8192)) for _ in range(20)]
        calls = [
            link.begin("echo", b"", [pattern(8192, seed)], into=[into[seed]], deadline_s=10.0)
            for seed in range(20)
        ]
        with pytest.raises(MessageTooLarge):
            link.begin("keep", b"", [pattern(MIB)], deadline_s=10.0)
        for call in calls:
            call.finish()
        assert into == [pattern(8192, seed) for seed in range(20)]

    def test_of_several_links_are_served_at_once(self, dial: Dial) -> None:
        links = [dial() for _ in range(5)]
        began_s = time.monotonic()
        calls = [link.begin("slow", b"2", deadline_s=20.0) for link in links]
        assert {call.finish().header for call in calls} == {b"at last"}
        assert time.monotonic() - began_s < 9, "one after the other they take 10 s"

    def test_from_many_threads_keep_apart(self, dial: Dial) -> None:
        def talk(link: PeerLink, seed: int) -> bool:
            for size in (1, 9000, 70_000, 3 * MIB):
                into = [memoryview(bytearray(size))]
                link.ask("echo", b"", [pattern(size, seed)], into=into, deadline_s=30.0)
                if into[0] != pattern(size, seed):
                    return False
            return True

        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(talk, [dial() for _ in range(6)], range(6)))

    def test_an_answer_may_have_fewer_buffers_than_there_is_room_for(self, dial: Dial) -> None:
        into = [memoryview(bytearray(size)) for size in (10, 70_000, 5)]
        answer = dial().ask("source", b"10 70000", into=into, deadline_s=10.0)
        assert answer.buffers == 2
        assert into == [pattern(10), pattern(70_000), bytes(5)]

    def test_an_answer_of_another_size_closes_the_link(self, dial: Dial) -> None:
        link = dial()
        with pytest.raises(InvalidMessage):
            link.ask("source", b"11", into=[memoryview(bytearray(10))], deadline_s=10.0)
        assert link.closed


class TestErrors:
    def test_of_a_receiver_reach_the_asker_and_the_link_goes_on(self, dial: Dial, process: Process) -> None:
        link = dial()
        with pytest.raises(errors.InvalidRequest) as refused:
            link.ask("refuse", b"", [pattern(3 * MIB)], deadline_s=10.0)
        assert (refused.value.message, refused.value.retry_after_s) == ("no room", 0.5)
        with pytest.raises(errors.InvalidRequest, match="nowhere"):
            link.ask("nowhere", b"", [pattern(10)], deadline_s=10.0)
        with pytest.raises(errors.InternalError):
            link.ask("fail", deadline_s=10.0)
        assert link.ask("echo", b"still here", deadline_s=10.0).header == b"still here"
        assert process.ask("counts")["abandoned"] == 0

    def test_a_late_answer_is_dropped(self, dial: Dial, process: Process) -> None:
        link = dial()
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            link.ask("slow", b"3", deadline_s=0.2)
        assert 0.15 < time.monotonic() - began_s < 2.9
        assert link.closed
        with pytest.raises(PeerLost):
            link.ask("echo", deadline_s=1.0)
        wait_until(lambda: process.ask("links") == 0)
        assert dial().ask("echo", b"again", deadline_s=5.0).header == b"again"

    def test_corrupted_data_is_never_committed(self, end: End, process: Process) -> None:
        end.dial_in(process)
        process.ask("lie")
        for sizes in ([8192], [LARGE_BYTES]):
            assert process.ask("keep", sizes, 20.0) == "InvalidMessage"
            end.dial_in(process)
        assert (end.counts.admitted, end.counts.committed, end.counts.abandoned) == (2, 0, 2)

    @pytest.mark.parametrize("size", [8192, 3 * MIB])
    def test_a_corrupted_answer_closes_the_link(self, dial: Dial, process: Process, size: int) -> None:
        link = dial()
        process.ask("lie")
        with pytest.raises(InvalidMessage, match="corrupted"):
            link.ask("source", b"%d" % size, into=[memoryview(bytearray(size))], deadline_s=10.0)
        assert link.closed

    def test_closing_from_another_thread_ends_a_wait(self, dial: Dial) -> None:
        link = dial()
        with _aside(lambda: link.ask("slow", b"5", deadline_s=20.0)) as raised:
            time.sleep(0.1)
            link.close()
        assert isinstance(raised[0], PeerLost)


class TestStops:
    """SIGSTOP: the peer is silent without an end of file, and resumes later. SIGKILL: it does not."""

    @pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
    def test_of_the_answering_peer_while_it_is_sent_to(
        self, dial: Dial, process: Process, blow: signal.Signals
    ) -> None:
        link, is_dead = _warm(dial()), blow == signal.SIGKILL
        process.send_signal(signal.SIGSTOP)
        deadline_s, began_s = 20.0 if is_dead else 0.5, time.monotonic()
        with _aside(lambda: link.ask("keep", b"", [pattern(LARGE_BYTES)], deadline_s=deadline_s)) as raised:
            time.sleep(0.3)
            process.send_signal(blow)
        assert time.monotonic() - began_s < 0.5 + BUSY_S
        assert isinstance(raised[0], PeerLost if is_dead else DeadlineExceeded) and link.closed
        if not is_dead:
            process.send_signal(signal.SIGCONT)
            wait_until(lambda: process.ask("links") == 0)
            assert process.ask("counts")["committed"] == 1
            assert dial().ask("echo", b"again", deadline_s=5.0).header == b"again"

    def test_a_whole_message_that_lay_there_meanwhile_is_dropped(self, dial: Dial, process: Process) -> None:
        link = _warm(dial())
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            link.ask("keep", b"", [pattern(8192)], deadline_s=0.3)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: process.ask("links") == 0)
        counts = process.ask("counts")
        assert counts["committed"] == 1
        assert counts["abandoned"] == counts["admitted"] - 1

    @pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
    def test_of_the_answering_peer_while_it_answers(
        self, dial: Dial, process: Process, blow: signal.Signals
    ) -> None:
        link = _warm(dial())
        into = [memoryview(bytearray(LARGE_BYTES))]
        is_dead = blow == signal.SIGKILL
        deadline_s = 20.0 if is_dead else 1.2
        call = link.begin("source", b"%d" % LARGE_BYTES, into=into, deadline_s=deadline_s)
        time.sleep(0.4)
        process.send_signal(blow)
        with pytest.raises(PeerLost if is_dead else DeadlineExceeded):
            call.finish()
        assert link.closed
        process.send_signal(signal.SIGCONT)
        _rests(into)
        if not is_dead:
            wait_until(lambda: process.ask("links") == 0)

    @pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
    def test_of_the_asking_peer_while_it_sends(
        self, end: End, process: Process, blow: signal.Signals
    ) -> None:
        end.dial_in(process)
        assert process.ask("keep", [MIB], 10.0) == "kept"
        held, is_dead = Held(end), blow == signal.SIGKILL
        process.tell("keep", [LARGE_BYTES], 20.0 if is_dead else 1.0)
        assert held.reached.wait(10.0)
        process.send_signal(blow)
        held.go_on.set()
        wait_until(lambda: end.counts.abandoned == 1)
        process.send_signal(signal.SIGCONT)
        _rests(end.counts.buffers)
        assert is_dead or process.answer() in ("DeadlineExceeded", "PeerLost")
        assert end.counts.committed == 1
        wait_until(lambda: not end.listener.links)


class TestEntry:
    def test_takes_a_ticket_that_was_issued_once(self, end: End) -> None:
        stolen, used = end.ticket(ELSE), end.ticket(ELSE)
        end.enter(ELSE, ticket=used).close()
        third = Peer("worker-third", 1)
        for who, shown in ((ELSE, b"x" * 24), (ELSE, b""), (third, stolen), (ELSE, stolen), (ELSE, used)):
            with pytest.raises(Unauthorized):
                end.enter(who, ticket=shown)
        with pytest.raises(errors.StaleEpoch):
            end.enter(ELSE, Peer(OWN.worker_id, OWN.incarnation - 1))

    def test_of_a_later_incarnation_ends_the_links_of_the_earlier(self, end: End) -> None:
        unused = end.ticket(ELSE)
        link = end.enter(ELSE)
        assert link.ask("echo", b"1", deadline_s=5.0).header == b"1"
        end.ticket(Peer(ELSE.worker_id, 2))
        with pytest.raises((errors.StaleEpoch, PeerLost)):
            link.ask("keep", b"", [pattern(3 * MIB)], deadline_s=5.0)
        assert end.counts.admitted == 1
        wait_until(lambda: link.closed)
        link.close()
        with pytest.raises(Unauthorized):
            end.enter(ELSE, ticket=unused)

    def test_after_a_death_is_a_new_link_to_a_new_process(
        self, transport: BulkTransport, process: Process, dial: Dial
    ) -> None:
        link = dial()
        process.end()
        with pytest.raises(errors.KvasirError):
            link.ask("echo", deadline_s=5.0)
        with pytest.raises((errors.NoResponder, PeerLost)):
            transport.dial(process.address, OWN, process.peer, b"x" * 24, deadline_s=5.0)
        process.__init__(transport.name)  # type: ignore[misc]
        assert dial().ask("echo", b"new", deadline_s=5.0).header == b"new"


class TestBounds:
    def test_of_links(self, end: End) -> None:
        links = [end.enter(ELSE) for _ in range(LIMITS.links)]
        with pytest.raises(errors.Overloaded):
            end.enter(ELSE)
        links.pop().close()
        wait_until(lambda: len(end.listener.links) == LIMITS.links - 1)
        links.append(end.enter(ELSE))
        assert links[-1].ask("echo", b"in", deadline_s=5.0).header == b"in"
        for link in links:
            link.close()

    @pytest.mark.parametrize(
        ("header_bytes", "sizes"), [(LIMITS.header_bytes + 1, [1]), (1, [1] * 4097), (1, [40 * MIB] * 2)]
    )
    def test_of_messages_are_the_receivers(self, end: End, header_bytes: int, sizes: list[int]) -> None:
        link = end.enter(ELSE)
        with pytest.raises((MessageTooLarge, PeerLost)):
            link.ask("keep", bytes(header_bytes), [pattern(size) for size in sizes], deadline_s=5.0)
        assert end.counts.admitted == 0
        link.close()

    def test_of_memory(self, dial: Dial, process: Process) -> None:
        link = dial()
        data, into = pattern(4 * MIB), memoryview(bytearray(4 * MIB))
        link.ask("echo", b"", [data], into=[into], deadline_s=10.0)
        before = process.ask("peak_bytes")
        for _ in range(40):
            link.ask("echo", b"", [data], into=[into], deadline_s=10.0)
        assert process.ask("peak_bytes") - before < 24 * MIB
