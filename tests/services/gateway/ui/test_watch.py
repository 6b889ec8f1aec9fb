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
from services.gateway.ui.watch import QUEUED_PICTURES, Viewer


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
