"""The site's contents: every page has its place in it, links lead somewhere, messages are the code's."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "deploy" / "site"))
import pages  # type: ignore[import-not-found]  # noqa: E402

DOCS = ROOT / "docs"


def test_every_page_is_in_one_section() -> None:
    listed = [page for section in pages.contents(DOCS) for names in section.values() for page in names]
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(listed) == len(set(listed)) and there | {f"{name}.md" for name in pages.MADE} == set(listed)
    assert listed.index("decisions/README.md") < listed.index("decisions/0001-dependencies.md")


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("README.md", "[pie](docs/pie.md#how-far)", "[pie](pie.md#how-far)"),
        ("README.md", "![page](docs/live-page.png)", "![page](live-page.png)"),
        ("README.md", "[s](services/worker/README.md)", "s (`services/worker/README.md`)"),
        ("docs/decisions/0001.md", "[pie](../pie.md)", "[pie](../pie.md)"),
        ("docs/pie.md", "[back](../README.md)", "[back](index.md)"),
        ("docs/pie.md", "[there](https://example.org/a.md) [here](#here)", None),
        ("docs/pie.md", "```\n[not](a/link.py)\n```", None),
    ],
)
def test_links_lead_where_the_site_has_something(page: str, text: str, expected: str | None) -> None:
    assert pages.inside(text, page) == (text if expected is None else expected)


def test_every_diagram_was_drawn_as_it_is_now() -> None:
    """Else: make diagrams."""
    sources = [source for path in DOCS.rglob("*.md") for source in pages.diagrams_of(path.read_text())]
    assert len(sources) > 2
    wanted = {pages.picture_of(source) for source in sources}
    assert {path.name for path in (DOCS / pages.DIAGRAMS).glob("*.svg")} == wanted
    shown = pages.drawn(f"a\n```mermaid\n{sources[0]}```\nb", "papers/pie.md")
    assert shown == f"a\n![diagram](../diagrams/{pages.picture_of(sources[0])})\nb"
    assert (DOCS / "papers" / shown.split("(")[1].split(")")[0]).exists()


def test_anchors_are_those_of_the_repository() -> None:
    assert pages.anchor("In blocks: one step", "-") == "in-blocks-one-step"
    assert pages.anchor("`enabled` and *more*", "-") == "enabled-and-more"


def test_every_message_is_told_with_its_fields() -> None:
    folder = ROOT / "shared" / "messages"
    text = pages.messages(folder)
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert f"### {node.name}\n" in text
    grant = re.search(r"### BorrowBlocks\n(.*?)\n### ", text, re.DOTALL)
    assert grant is not None
    assert "| `least_blocks` | `Count = 1` | A grant of fewer is of no use. |" in grant[1]
