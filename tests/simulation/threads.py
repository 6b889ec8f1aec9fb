"""What `threading` and `queue` offer, for strands. Stands in for them where services use them."""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty
from typing import Any

from tests.simulation.world import Strand, World

_world: World | None = None


def use(world: World | None) -> None:
    """From now on it is that one's strands that wait."""
    global _world
    _world = world


def strand() -> Strand:
    """The running one."""
    assert _world is not None and _world.strand is not None, "only what runs in a process can wait"
    return _world.strand


def sleep(seconds: float) -> None:
    """`time.sleep` of a thread; a slow process sleeps longer, as what it waits for is slow."""
    me = strand()
    me.wait(seconds * me.process.slowness)


class Lock:
    """Handed over in order."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Strand] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._is_held:
            self._is_held = True
            return True
        if not blocking:
            return False
        me = strand()
        self._waiting.append(me)
        if me.wait(None if timeout < 0 else timeout):
            return True
        if me in self._waiting:
            self._waiting.remove(me)
            return False
        return True  # It was handed over at the same moment.

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release of a lock that nobody holds")
        while self._waiting:
            heir = self._waiting.popleft()
            if not heir.is_over:
                heir.wake()
                return
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """The same, which its holder may take again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Strand | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = strand()
        if self._owner is me:
            self._depth += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """On a lock that is held for no time: nothing else of the process runs between two waits."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = Lock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[Strand] = deque()

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = strand()
        self._waiting.append(me)
        self._lock.release()
        is_woken = me.wait(timeout)
        if not is_woken and me in self._waiting:
            self._waiting.remove(me)
        self._lock.acquire()
        return is_woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        assert _world is not None
        end_s = None if timeout is None else _world.now_s + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - _world.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        while self._waiting and n > 0:
            self._waiting.popleft().wake()
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[Strand] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            self._waiting.popleft().wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            me = strand()
            self._waiting.append(me)
            if not me.wait(timeout) and me in self._waiting:
                self._waiting.remove(me)
        return self._is_set


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] = lambda: None,
        name: str = "thread",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self._run = lambda: target(*args, **(kwargs or {}))
        self._process = strand().process
        self._strand: Strand | None = None
        self._over = Event()

    def start(self) -> None:
        self._strand = self._process.strand(self.name, self._run)
        self._strand.on_over.append(self._over.set)

    def is_alive(self) -> bool:
        return self._strand is not None and not self._strand.is_over

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)


class SimpleQueue:
    def __init__(self) -> None:
        self._items: Any = deque()
        self._waiting: deque[Strand] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._push(item)
        if self._waiting:
            self._waiting.popleft().wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and block:
            assert _world is not None
            me, end_s = strand(), None if timeout is None else _world.now_s + timeout
            while not self._items and (end_s is None or _world.now_s < end_s):
                self._waiting.append(me)
                if not me.wait(None if end_s is None else end_s - _world.now_s) and me in self._waiting:
                    self._waiting.remove(me)
        if not self._items:
            raise Empty
        return self._pop()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items

    def _push(self, item: Any) -> None:
        self._items.append(item)

    def _pop(self) -> Any:
        return self._items.popleft()


class PriorityQueue(SimpleQueue):
    def __init__(self) -> None:
        super().__init__()
        self._items = []

    def _push(self, item: Any) -> None:
        heapq.heappush(self._items, item)

    def _pop(self) -> Any:
        return heapq.heappop(self._items)


def get_ident() -> int:
    return id(strand())


def get_native_id() -> int:
    """None that the system knows: what wants to be polite by it is refused."""
    raise OSError("a virtual thread")
