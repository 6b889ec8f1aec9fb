"""The live page in a real Chromium: it shows what /metrics says, obeys keys and fits a phone."""

import asyncio
import json
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import EXECUTABLE, Page, browser
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
needs_chromium = pytest.mark.skipif(
    EXECUTABLE is None, reason="there is no Chromium (apt-get install chromium)"
)
SETTINGS = ("worker.kv_blocks=64", "worker.simulated.speed=20")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("page") / "run"
    with running_stack(folder, workers=2, settings=SETTINGS, flags=("--engine", "simulated")) as running:
        yield running


@pytest.fixture
def page(watched: RunningStack) -> Iterator[Page]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as opened:
        yield opened


def ask_all(stack: RunningStack, count: int = 24) -> None:
    prompts = mixed(count, longest_words=200, seed=5)
    questions = [Question(prompt, {"seed": seed, "max_tokens": 200}) for seed, prompt in enumerate(prompts)]
    answers = asyncio.run(stack.client().ask_all(questions))
    assert all(answer.complete for answer in answers), [answer.errors for answer in answers]


def look(page: Page, stack: RunningStack, fragment: str = "") -> None:
    page.size(1280, 900)
    page.open(f"{stack.url}/ui#key={stack.key}{fragment}")
    page.until("Number(document.body?.dataset.heard) > 1")


def get(url: str, key: str = "", host: str = "") -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers | ({"host": host} if host else {}))
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def gauges(stack: RunningStack, name: str) -> dict[str, float]:
    """Values of a metric by its worker and its other label."""
    text = get(f"{stack.operator_url}/metrics")[1].decode()
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.M)
    values = {}
    for labels, value in found:
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        values[" ".join([named.pop("worker", ""), *named.values()])] = float(value)
    return values


def told(stack: RunningStack, path: str) -> dict[str, Any]:
    status, body = get(f"{stack.url}{path}", stack.key)
    assert status == 200, body
    return dict(json.loads(body))


@needs_chromium
def test_figures_are_those_of_metrics(watched: RunningStack, page: Page) -> None:
    ask_all(watched)
    look(page, watched)
    page.until("[...document.querySelectorAll('[data-tile=running] b')].some((b) => b.textContent === '0')")
    page.until("document.querySelectorAll('.worker').length === 2")
    blocks = gauges(watched, "kvasir_worker_kv_blocks")
    hits = gauges(watched, "kvasir_worker_prefix_blocks")
    for worker in ("worker-0", "worker-1"):
        title = page.evaluate(f"document.querySelector('[data-worker={worker}]').title")
        shown = [int(number) for number in re.findall(r"\d+", title)]
        places = ("used", "evictable", "free", "total", "host_used", "host", "disk_used", "disk")
        assert shown[: len(places)] == [blocks[f"{worker} {place}"] for place in places], title
        row = told(watched, f"/ui/workers/{worker}")
        assert row["hits"] == {tier: hits[f"{worker} {tier}"] for tier in row["hits"]}
    found = sum(value for name, value in hits.items() if name.split()[1] in ("device", "host", "disk"))
    misses = sum(value for name, value in hits.items() if name.endswith("misses"))
    share = page.evaluate("document.querySelector('[data-tile=\"of prompt blocks found\"] b').textContent")
    assert misses > 0
    assert share == f"{round(found / (found + misses) * 100)} %"
    assert page.faults == []


@needs_chromium
def test_traffic_from_the_chat_box_and_what_a_click_tells(watched: RunningStack, page: Page) -> None:
    look(page, watched)
    page.evaluate("document.activeElement.blur()")
    page.press("/")
    assert page.evaluate("document.activeElement.id") == "question"
    page.type("Tell me of the sea")
    page.evaluate("document.getElementById('times').value = 3")
    page.press("Enter")
    page.until("/^3 of 3 answered/.test(document.getElementById('chat-note').textContent)")
    assert len(page.evaluate("document.getElementById('answer').textContent")) > 0
    page.evaluate("document.querySelector('.worker').click()")
    page.until("/All that it says/.test(document.getElementById('detail-body').textContent)")
    page.press("Escape")
    page.until("!document.getElementById('detail').open")
    assert page.faults == []


@needs_chromium
def test_it_asks_for_a_key_and_takes_one(watched: RunningStack, page: Page) -> None:
    page.open(f"{watched.url}/ui")
    page.until("document.getElementById('key-form')?.hidden === false")
    page.type(watched.key)
    page.press("Enter")
    page.until("Number(document.body.dataset.heard) > 1")
    assert page.evaluate("document.getElementById('key-form').hidden") is True


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_phone_in_either_theme(watched: RunningStack, page: Page, theme: str) -> None:
    look(page, watched, f"&theme={theme}")
    page.size(390, 844, is_phone=True)
    page.until("document.documentElement.scrollWidth <= 390")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (theme == "dark")
    page.evaluate("document.activeElement.blur()")
    page.press("t")
    page.until(f"document.documentElement.dataset.theme !== '{theme}'")
    assert page.faults == []


def test_data_are_the_admins_and_the_operators(watched: RunningStack) -> None:
    assert get(f"{watched.url}/ui")[0] == 200
    assert get(f"{watched.url}/ui/vendor/uPlot.LICENSE")[0] == 200
    for path in ("/ui/stream", "/ui/workers/worker-0", "/ui/requests/req_1"):
        assert get(f"{watched.url}{path}")[0] == 401
        assert get(f"{watched.operator_url}{path}", host="evil.example")[0] == 403
    assert get(f"{watched.operator_url}/ui/workers/worker-0")[0] == 200
    assert get(f"{watched.url}/ui/../config.py", watched.key)[0] == 404
    assert get(f"{watched.url}/ui/%2e%2e/routes.py", watched.key)[0] == 404
