"""The live page: bounded queues of viewers, and a dash for what a service of another release does not say."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import ui
from services.gateway.counters import EndedRequest, RecentRequests
from services.gateway.ui.watch import GONE_S, MOST_GONE, QUEUED_PICTURES, Departed, Viewer


@given(st.lists(st.booleans(), max_size=60))
def test_a_slow_viewer_costs_bounded_memory_and_resynchronises(reads: list[bool]) -> None:
    """Whatever the order of pictures and reads: what is read after a gap begins with a whole picture."""

    async def play() -> None:
        viewer = Viewer()
        number, last = 0, None
        for is_read in reads:
            if is_read:
                if viewer._pictures.empty():
                    continue
                picture = await viewer.next()
                assert picture is not None
                kind, at = picture.split()
                assert kind == b"whole" or last is None or int(at) == last + 1
                assert last is not None or kind == b"whole"
                last = int(at)
            else:
                number += 1
                is_whole = viewer.needs_whole
                kind = b"whole" if is_whole else b"part"
                viewer.offer(b"%s %d" % (kind, number), is_whole=is_whole)
            assert viewer._pictures.qsize() <= QUEUED_PICTURES

    asyncio.run(play())


async def test_the_end_reaches_a_viewer_whose_queue_is_full() -> None:
    viewer = Viewer()
    for _ in range(QUEUED_PICTURES):
        viewer.offer(b"picture", is_whole=True)
    viewer.end()
    assert await asyncio.wait_for(viewer.next(), 1) is None


STATIC = Path(ui.__file__).parent / "static"
NODE = shutil.which("node")
PAGE = """
class Node {
  constructor() { this.cells = []; this.textContent = ""; }
  append(...made) { this.cells.push(...made); }
  replaceChildren(...made) { this.cells = made; }
}
globalThis.Node = Node;
globalThis.document = { createElement: () => new Node(), getElementById: () => null };
const { count, percent, rows, seconds, short, tenths } = await import(process.argv[1]);
const body = new Node(), row = { tenant: "a", waiting: 0, served_s: 1.25 };
rows(body, [row], (row) => [row.tenant, row.waiting, row.running, short(row.request), tenths(row.served_s),
  tenths(row.charged_s), count(row.computed_tokens + row.cached_tokens), seconds(row.waited_s),
  percent(row.share)], "nobody");
console.log(JSON.stringify(body.cells[0].cells.map((cell) => cell.textContent)));
"""


@pytest.mark.skipif(NODE is None, reason="there is no Node.js (apt-get install nodejs)")
def test_a_field_that_is_not_sent_is_a_dash(tmp_path: Path) -> None:
    """While a stack was rolled from a release that did not send it, the page said "undefined" and "NaN", or
    stood still where a number was to be written with its tenths."""
    assert NODE is not None
    module = tmp_path / "dom.mjs"  # By its name alone Node.js takes it for a module, as browsers do.
    module.write_text((STATIC / "dom.js").read_text())
    command = [NODE, "--input-type=module", "--eval", PAGE, module.as_uri()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == ["a", "0", "–", "–", "1.3", "–", "–", "–", "–"]


def test_percentiles_are_of_the_last_minute_by_model() -> None:
    recent = RecentRequests()
    assert recent.picture(0.0) == []
    recent.add(EndedRequest(0.0, "old", 200, 9.0, 9.0, 9.0))
    for number in range(1, 101):
        recent.add(EndedRequest(30.0, "a", 200, number / 100, None, number / 10))
    recent.add(EndedRequest(31.0, "a", 429, None, None, None))
    recent.add(EndedRequest(31.0, "b", 503, None, None, None))
    a, b = recent.picture(61.0)
    assert (a["model"], a["requests"], a["refused"], a["errors"]) == ("a", 101, 1, 0)
    assert a["first_token_s"] == pytest.approx([0.5, 0.95, 0.99], abs=0.011)
    assert a["whole_s"] == pytest.approx([5.0, 9.5, 9.9], abs=0.11)
    assert a["token_s"] is None  # answers of one token have nothing between tokens
    assert (b["model"], b["errors"], b["whole_s"]) == ("b", 1, None)


def test_a_worker_that_went_is_shown_until_ten_minutes_after_and_while_a_trouble_names_it() -> None:
    departed = Departed()
    departed.on_sample({"worker-0": "m", "worker-1": "m"}, 0.0)
    departed.on_sample({"worker-0": "m"}, 1.0)
    (row,) = departed.rows(("worker-1 crashed", "worker-0 is slow"), 2.0)
    assert (row["id"], row["gone_unix_s"], row["back_unix_s"]) == ("worker-1", 1.0, None)
    assert row["why"] == "worker-1 crashed"
    departed.on_sample({"worker-0": "m", "worker-1": "m"}, 5.0)
    assert departed.rows((), 6.0)[0]["back_unix_s"] == 5.0
    assert len(departed.rows(("worker-1 crashed",), 6.0 + GONE_S)) == 1
    assert departed.rows((), 6.0 + GONE_S) == []
    departed.on_sample({f"worker-{number}": "m" for number in range(3 * MOST_GONE)}, 7.0)
    departed.on_sample({}, 8.0)
    assert len(departed.rows((), 9.0)) == MOST_GONE
