"""What a service of another release does not say is a dash on the live page."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from services.gateway import ui

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
