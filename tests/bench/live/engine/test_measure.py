"""One cell on a real stack: bound, measured, stopped for longer than its timeouts, measured again."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kit.cores import Cores, pin
from bench.kit.load import run_batch
from bench.kit.models import TINY_CHAT, vocabulary
from bench.kit.peers import Server, Setup, start_kvasir
from bench.live.engine.measure import measure, warm
from bench.live.engine.workload import BatchCell, bodies

CELL = BatchCell(30, 4, 8)
_PAUSE_S = 3.5
"""Longer than what makes a worker lost and a lease run out."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("side")
    served = start_kvasir(Setup(TINY_CHAT, 1, 8, Cores.choose().engine, folder))
    yield served
    served.side.end()


@pytest.mark.stack
def test_a_side_is_measured_before_and_after_a_pause(served: Server) -> None:
    rounds = bodies(CELL, vocabulary(TINY_CHAT), random.Random(1))
    cores = Cores.choose()
    thread = pin(served.side, cores, lambda: run_batch(served.target, rounds[0], 30.0), served.engine)
    assert thread in served.side.threads_of("worker-0")
    first, answers = measure(served, thread, CELL, rounds)
    assert (first.failures, first.error) == (0, "")
    assert [len(one) for one in answers] == [CELL.batch] * CELL.rounds
    assert first.tok_s == pytest.approx(CELL.tokens / first.wall_s)
    assert 0 < first.engine_share <= 1.1
    assert first.client_share > 0
    served.side.pause()
    time.sleep(_PAUSE_S)
    served.side.resume()
    warm(served)
    again, _ = measure(served, thread, CELL, rounds)
    assert (again.failures, again.error) == (0, "")
    assert again.engine_share > 0
