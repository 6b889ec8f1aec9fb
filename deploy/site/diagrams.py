"""`make diagrams`: draws the Mermaid diagrams of docs/ as SVG, into docs/diagrams/, for the site.

Where the files are read, whoever shows them draws the diagrams. The site has no script from elsewhere and no
network, so it shows what was drawn here, by Mermaid in a Chromium: `diagrams.py MERMAID.min.js`. A picture's
name is a digest of its source: what changed has none yet, and tests say so.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from pages import DIAGRAMS, diagrams_of, picture_of  # noqa: E402

from tests.chromium import browser  # noqa: E402

_CONFIG = {
    "startOnLoad": False,
    "theme": "neutral",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False},
    "fontFamily": "sans-serif",
}


def main(script: Path) -> None:
    docs = ROOT / "docs"
    sources = [source for path in sorted(docs.rglob("*.md")) for source in diagrams_of(path.read_text())]
    folder = docs / DIAGRAMS
    folder.mkdir(exist_ok=True)
    wanted = {picture_of(source): source for source in sources}
    for path in folder.glob("*.svg"):
        if path.name not in wanted:
            path.unlink()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as page:
        page.open("data:text/html,<body></body>")
        page.until("document.readyState === 'complete'")
        page.evaluate(script.read_text() + ";0")
        page.evaluate(f"mermaid.initialize({json.dumps(_CONFIG)})")
        for name, source in wanted.items():
            if not (folder / name).exists():
                drawn = page.evaluate(f"mermaid.render('drawn', {json.dumps(source)}).then((r) => r.svg)")
                (folder / name).write_text(drawn + "\n")
                print(f"drawn: docs/{DIAGRAMS}/{name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
