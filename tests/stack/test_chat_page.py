"""The chat page in a real Chromium: turns, edits, a stop, safe Markdown, a key that it asks for."""

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chromium import EXECUTABLE, Page, browser
from tests.stack.running import RunningStack
from tests.stack.test_live_page import ask_all

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium (apt-get install chromium)"),
]
AXE = Path(".cache/axe/package/axe.min.js")
"""`make axe` fetches it."""


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as opened:
        yield opened


@pytest.fixture
def page(tab: Page, simulated: RunningStack) -> Page:
    tab.attach()
    tab.size(1280, 900)
    tab.open(f"{simulated.url}/ui/chat#key={simulated.key}")
    tab.until("Number(document.body?.dataset.ready) > 0")
    return tab


def say(page: Page, text: str) -> None:
    page.evaluate("document.getElementById('question').focus()")
    page.type(text)
    page.press("Enter")


def click(page: Page, text: str, of: str = "document") -> None:
    page.evaluate(f"[...{of}.querySelectorAll('button')].find((b) => b.textContent === '{text}').click()")


def turns(page: Page) -> list[list[str]]:
    """Role and text of each turn."""
    return list(
        page.evaluate(
            "[...document.querySelectorAll('#turns > li')].map((turn) => "
            "[turn.className, turn.querySelector('.words')?.textContent ?? ''])"
        )
    )


def until_answered(page: Page, count: int) -> None:
    page.until(f"document.querySelectorAll('#turns > li').length === {count}")
    page.until("document.getElementById('stop').hidden")


def test_three_turns_each_with_its_figures_and_where_its_time_went(page: Page) -> None:
    for number, text in enumerate(("Tell me of the sea.", "And of a boat?", "How does it end?"), 1):
        page.evaluate("document.getElementById('most').value = '60'")  # three answers must fit the context
        say(page, text)
        until_answered(page, 2 * number)
    shown = turns(page)
    assert [role for role, _ in shown] == ["user", "assistant"] * 3
    assert all(text for _, text in shown)
    figures = page.evaluate("[...document.querySelectorAll('.below span')].map((span) => span.textContent)")
    assert all("first token after" in text and "tokens/s" in text for text in figures), figures
    assert "prompt tokens cached" in figures[-1]  # the turns before it were the same
    click(page, "Where did the time go?")
    page.until("document.querySelectorAll('#detail-body .lane i').length > 0")
    page.evaluate("window.isOld = true; location.reload()")
    page.until("!window.isOld && document.querySelectorAll('#turns > li').length === 6")  # the tab keeps them
    assert turns(page) == shown
    assert page.faults == []


def test_an_edited_question_and_asking_again_replace_what_followed(page: Page) -> None:
    say(page, "Tell me of the sea.")
    until_answered(page, 2)
    say(page, "And then?")
    until_answered(page, 4)
    click(page, "Edit", "document.querySelector('#turns > li')")
    page.evaluate("document.querySelector('textarea.edit').value = 'Tell me of the sky.'")
    click(page, "Send", "document.querySelector('#turns')")
    until_answered(page, 2)
    assert turns(page)[0] == ["user", "Tell me of the sky."]
    click(page, "Ask again")
    until_answered(page, 2)
    click(page, "New chat")
    page.until("document.querySelectorAll('#turns > li').length === 0")
    assert page.faults == []


def test_a_stopped_answer_says_so_and_settings_are_sent(page: Page) -> None:
    page.evaluate("document.getElementById('most').value = 4")
    page.evaluate("document.getElementById('system').value = 'Be brief.'")
    say(page, "Tell me of the sea.")
    until_answered(page, 2)
    assert "4 tokens" in page.evaluate("document.querySelector('.below span').textContent")
    copied = (
        "window.copied = ''; navigator.clipboard.writeText = async (text) => { window.copied = text; }; 0"
    )
    page.evaluate(copied)
    click(page, "Copy as Python")
    page.until("window.copied.length > 0")
    code = page.evaluate("window.copied")
    compile(code, "copied", "exec")
    assert "Be brief." in code and "max_tokens=4" in code and "sk-" not in code
    click(page, "Copy as curl")
    page.until("window.copied.startsWith('curl ')")
    page.evaluate("document.getElementById('most').value = 600")
    say(page, "And a very long story.")
    page.until("document.getElementById('stop').hidden === false")
    click(page, "Stop")
    until_answered(page, 4)
    assert "stopped" in turns(page)[-1][1]
    assert page.faults == []


def test_markdown_is_elements_and_html_stays_text(page: Page) -> None:
    text = (
        "# Title\n\n**bold** `<b>` &lt;tag&gt; <img src=x onerror=alert(1)> [web](https://example.org) "
        "[bad](javascript:alert(1))\n\n- [x] done\n\n```\n<script>\n```\n\n| a |\n|---|\n| 1 |\n"
    )
    page.evaluate(
        "import('/ui/markdown.js').then((m) => { const box = document.createElement('div'); box.id = 'made'; "
        f"box.append(...m.markdown({json.dumps(text)})); document.body.append(box); }})"
    )
    count = "['h3', 'strong', 'table', 'pre', 'img', 'script', 'a'].map((tag) => "
    found = page.evaluate(f"{count}document.querySelectorAll(`#made ${{tag}}`).length)")
    assert found == [1, 1, 1, 1, 0, 0, 1]
    shown = page.evaluate("document.getElementById('made').textContent")
    assert "<img src=x onerror=alert(1)>" in shown and "<tag>" in shown and "javascript:alert" in shown
    assert page.evaluate("document.querySelector('#made a').href") == "https://example.org/"
    assert page.faults == []


def test_a_browser_at_the_root_comes_here_and_without_a_key_it_asks(
    simulated: RunningStack, tab: Page
) -> None:
    tab.attach()
    tab.open(simulated.url)
    tab.until("location.pathname === '/ui/chat' && document.getElementById('key-form')?.hidden === false")
    tab.type(simulated.key)
    tab.press("Enter")
    tab.until("Number(document.body.dataset.ready) > 0")
    assert tab.evaluate("document.getElementById('key-form').hidden") is True
    try:
        urllib.request.urlopen(simulated.url, timeout=20)
    except urllib.error.HTTPError as error:
        assert error.code == 404 and "/ui/chat" in json.loads(error.read())["error"]["message"]


@pytest.mark.parametrize("path", ["chat", ""])
def test_it_fits_a_phone_and_axe_finds_nothing(simulated: RunningStack, page: Page, path: str) -> None:
    if not path:
        page.open(f"{simulated.url}/ui")
        page.until("Number(document.body?.dataset.heard) > 1")
        ask_all(simulated)  # Panels with nothing to show are hidden.
        page.until("!['events', 'batches', 'lengths'].some((id) => document.getElementById(id).hidden)")
    else:
        say(page, "Tell me of the sea.")
        until_answered(page, 2)
    page.size(390, 844, is_phone=True)
    page.until("document.documentElement.scrollWidth <= 390")
    if not AXE.exists():
        pytest.skip("axe is not here (make axe)")
    page.evaluate(f"{AXE.read_text()}; 0")
    for _ in range(2):
        rules = "r.violations.map((v) => v.id + ' ' + v.nodes.map((n) => n.target.join(' ')).join(', '))"
        assert page.evaluate(f"axe.run().then((r) => {rules})") == []
        page.evaluate("document.getElementById('theme').click()")
