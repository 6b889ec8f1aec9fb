"""The live page in a real Chromium: it shows what /metrics says, obeys keys and fits a phone."""

import json
import re
import signal
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import EXECUTABLE, Page, browser
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as opened:
        yield opened


@pytest.fixture
def page(tab: Page) -> Page:
    tab.attach()
    return tab


def ask_all(stack: RunningStack, count: int = 24) -> None:
    prompts = mixed(count, longest_words=200, seed=5)
    questions = [Question(prompt, {"seed": seed, "max_tokens": 200}) for seed, prompt in enumerate(prompts)]
    stack.answers(questions)


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
def test_figures_are_those_of_metrics(simulated: RunningStack, page: Page) -> None:
    ask_all(simulated)
    look(page, simulated)
    page.until("[...document.querySelectorAll('[data-tile=running] b')].some((b) => b.textContent === '0')")
    page.until("document.querySelectorAll('.worker').length === 2")
    blocks = gauges(simulated, "kvasir_worker_kv_blocks")
    hits = gauges(simulated, "kvasir_worker_prefix_blocks")
    for worker in ("worker-0", "worker-1"):
        title = page.evaluate(f"document.querySelector('[data-worker={worker}]').title")
        shown = [int(number) for number in re.findall(r"\d+", title)]
        places = ("used", "evictable", "free", "total", "host_used", "host", "disk_used", "disk")
        assert shown[: len(places)] == [blocks[f"{worker} {place}"] for place in places], title
        row = told(simulated, f"/ui/workers/{worker}")
        assert row["hits"] == {tier: hits[f"{worker} {tier}"] for tier in row["hits"]}
    found = sum(value for name, value in hits.items() if name.split()[1] in ("device", "host", "disk"))
    misses = sum(value for name, value in hits.items() if name.endswith("misses"))
    share = page.evaluate("document.querySelector('[data-tile$=\"the cache saved\"] b').textContent")
    assert misses > 0 and share == f"{round(found / (found + misses) * 100)} %" and page.faults == []


@needs_chromium
def test_tenants_hits_and_preemptions_are_as_in_status_and_metrics(
    simulated: RunningStack, page: Page
) -> None:
    ask_all(simulated)
    look(page, simulated)
    page.until("document.querySelector('[data-tile=running] b').textContent === '0'")
    (row,) = simulated.details("scheduler-0")["tenants"]
    read = "[...document.querySelectorAll('#tenant-rows td')].map((cell) => cell.textContent)"
    page.until(f"{read}[3] === '{row['sequences']}' && {read}[2] === '0'")
    tenant, waiting, running, served, *_ = page.evaluate(read)
    assert (tenant, waiting, running, served) == (row["tenant"], "0", "0", str(row["sequences"]))
    preempted = page.evaluate("document.querySelector('[data-tile=preempted] b').textContent")
    assert float(preempted) == gauges(simulated, "kvasir_fleet_preemptions")[""]
    hits = gauges(simulated, "kvasir_fleet_prefix_tokens")
    tile = "[...document.querySelectorAll('.tile')].find((t) => /expected/.test(t.dataset.tile))"
    expected, found = page.evaluate(f"{tile}.querySelector('b').textContent").split(" / ")
    assert hits[" found"] > 0
    for shown, tokens in ((expected, hits[" expected"]), (found, hits[" found"])):
        assert shown == (f"{round(tokens / 1e3)}k" if tokens >= 1e4 else f"{tokens:.0f}")
    assert page.faults == []


@needs_chromium
def test_a_loss_is_told_and_a_click_says_where_a_request_s_time_went(
    simulated: RunningStack, page: Page
) -> None:
    look(page, simulated)
    asking = threading.Thread(target=ask_all, args=(simulated,))
    asking.start()
    page.until("document.querySelectorAll('#request-rows button').length > 4")
    page.evaluate("document.querySelector('#request-rows button').click()")
    before = simulated.child("worker-1")["restarts"]
    simulated.signal("worker-1", signal.SIGKILL)
    page.until("/worker lost/.test(document.getElementById('event-rows').textContent)")
    page.until("document.querySelectorAll('#detail-body .lane i').length > 1")
    causes = page.evaluate("document.querySelector('#detail-body .causes').textContent")
    assert "%" in causes
    asking.join()
    simulated.until_restarted("worker-1", restarts=before + 1)
    assert page.faults == []


@needs_chromium
def test_the_first_line_names_a_dead_worker_and_its_card_stays(simulated: RunningStack, page: Page) -> None:
    look(page, simulated)
    verdict = "document.getElementById('state-text').textContent"
    page.until(f"/^well/.test({verdict}) || /crashed/.test({verdict})")
    simulated.signal("worker-1", signal.SIGSTOP)
    try:
        page.until("document.querySelector('.worker.gone b')?.textContent === 'worker-1'", within_s=10)
        page.until(f"/^not well: worker-1 /.test({verdict})", within_s=10)
        assert "worker-1" in page.evaluate("document.getElementById('reasons').innerText")
    finally:
        simulated.signal("worker-1", signal.SIGCONT)
    page.until("document.querySelector('.worker.back')?.dataset.departed === 'worker-1'")
    assert page.faults == []


@needs_chromium
def test_it_says_how_fast_requests_of_the_last_minute_were(simulated: RunningStack, page: Page) -> None:
    ask_all(simulated, 12)
    look(page, simulated)
    read = "[...document.querySelectorAll('#latency-rows td')].map((cell) => cell.textContent)"
    page.until(f"{read}.length === 13")
    model, rate, *rest = page.evaluate(read)
    assert (model, rest[-2:]) == (simulated.model.name, ["0", "0"]) and float(rate) > 0
    times = [float(text.split()[0]) * (1e-3 if text.endswith("ms") else 1) for text in rest[:-2]]
    for at in (0, 3, 6):  # p50, p95, p99 of each
        assert 0 <= times[at] <= times[at + 1] <= times[at + 2]
    assert 0 < times[0] <= times[6]  # the first token comes before the last
    page.until("/This gateway has run since \\d/.test(document.getElementById('release').textContent)")
    page.until("document.querySelectorAll('#latency-charts canvas').length === 3")
    assert page.faults == []


@needs_chromium
@pytest.mark.parametrize(
    ("picture", "how", "says"),
    [
        ({"unready": ["no worker serves tiny_chat"]}, "bad", "not well: no worker serves tiny_chat"),
        ({"troubles": ["worker-1 is slow: 90 ms a step, others 9"]}, "bad", "not well: worker-1 is slow"),
        ({"short_of": ["turns: 40 sequences queued"]}, "warn", "well, but short of turns: 40 sequences"),
        ({"uncached": ["worker-0", "worker-1"]}, "warn", "the prefix cache is off at every worker"),
    ],
    ids=["unready", "slow", "full queue", "no cache"],
)
def test_a_cause_is_named_in_the_first_line(
    simulated: RunningStack, page: Page, picture: dict[str, Any], how: str, says: str
) -> None:
    look(page, simulated)
    page.evaluate("document.getElementById('pause').click()")
    fleet = {"unready": [], "troubles": [], "short_of": [], "uncached": [], "scheduler": "scheduler-0"}
    shown = {"fleet": {**fleet, "policy": "kvasir", **picture}, "totals": {"workers": 2}}
    page.evaluate(f"import('/ui/verdict.js').then((m) => m.showVerdict({json.dumps(shown)}))")
    page.until(f"document.querySelector('.dot').className === 'dot {how}'")
    assert says in page.evaluate("document.getElementById('state-text').textContent")


@needs_chromium
def test_decisions_have_words_and_costs(simulated: RunningStack, page: Page) -> None:
    look(page, simulated)
    page.evaluate("document.getElementById('pause').click()")
    common = {"unix_s": 1.7e9, "request": "req_1"}
    offers = [["pause", 11, 0.952, ""], ["swap", 15, 1.2, ""]]
    moved = {"source": "worker-0", "target": "worker-1", "mode": "kv", "failed": "", "why": "it is full"}
    events = [
        {"kind": "relief", "worker": "worker-0", "chosen": "pause", "offers": offers, "unix_s": 1.7e9},
        {"kind": "moved", **moved, "moved_bytes": 5e5, "prepare_s": 0.3, "switch_s": 0.06, **common},
        {"kind": "moved", **moved, "failed": "it ended before", **common},
    ]
    page.evaluate(f"window.events = {json.dumps(events)}")
    show = "import('/ui/events.js').then((m) => m.showEvents(document.getElementById('event-rows'), "
    page.evaluate(f"{show}window.events, () => {{ window.asked = true; }}))")
    told = page.evaluate("[...document.querySelectorAll('#event-rows li')].map((e) => e.textContent)")
    assert "move failed" in told[0] and "it ended before" in told[0]
    assert "worker-0 → worker-1 as kv (it is full), 500k bytes, ready in 300 ms" in told[1]
    assert "chose pause: pause 11 blocks for 952 ms, swap 15 blocks for 1.2 s" in told[2]
    page.evaluate("document.querySelector('#event-rows a').click()")
    assert page.evaluate("window.asked") is True and page.faults == []


@needs_chromium
def test_charts_stay_side_by_side_when_the_theme_changes(simulated: RunningStack, page: Page) -> None:
    """Each was once as wide as all of them when made anew: its box was alone on the page then."""
    look(page, simulated)
    page.until("document.querySelectorAll('#charts .chart canvas').length === 4")
    for _ in range(2):
        page.evaluate("document.getElementById('theme').click()")
        wide = page.evaluate(
            "[...document.querySelectorAll('#charts .chart')]"
            ".map((b) => b.querySelector('.uplot').offsetWidth - b.clientWidth)"
        )
        assert len(wide) == 4 and max(wide) <= 0, wide


@needs_chromium
def test_traffic_from_the_chat_box_and_what_a_click_tells(simulated: RunningStack, page: Page) -> None:
    look(page, simulated)
    page.evaluate("document.getElementById('question').focus()")
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
def test_debts_are_a_graph_a_matrix_or_a_list(simulated: RunningStack, page: Page) -> None:
    """Simulated workers lend nothing: the module is asked itself."""
    look(page, simulated)
    page.evaluate("document.getElementById('pause').click()")
    rows = "document.getElementById('debt-rows')"
    for workers, drawn in ((0, "p"), (3, "svg table"), (12, "table"), (40, "table")):
        names = [f"worker-{at}" for at in range(workers)]
        debts = [
            {"creditor": one, "debtor": names[(at + 1) % workers], "blocks": at + 1, "host_blocks": 1}
            for at, one in enumerate(names)
        ]
        page.evaluate(f"import('/ui/debts.js').then((m) => m.showDebts({rows}, {json.dumps(debts)}))")
        made = page.evaluate(f"[...{rows}.children].map((e) => e.tagName.toLowerCase()).join(' ')")
        assert made == drawn
        if workers == 3:
            label = page.evaluate("document.querySelector('#debt-rows svg').getAttribute('aria-label')")
            assert label.endswith("worker-2 lends 4 to worker-0")
            assert page.evaluate("document.querySelectorAll('#debt-rows path.debt').length") == 3
    assert page.faults == []


@needs_chromium
def test_it_shows_batches_memory_and_lengths(simulated: RunningStack, page: Page) -> None:
    look(page, simulated)
    ask_all(simulated)
    said = "document.querySelector('#batch-rows canvas')?.getAttribute('aria-label')"
    page.until(f"/worker-\\d+: \\d+ answers and \\d+ prompt tokens in /.test({said})")
    drawn = "document.querySelector('#batch-rows canvas').getContext('2d').getImageData(0, 0, 999, 64).data"
    page.until(f"{drawn}.some((part) => part > 0)")
    lengths = "document.querySelector('#lengths:has(circle) small')?.textContent"
    page.until(f"/no longer than the 95 % bound/.test({lengths})")
    page.until("/process .* GiB, host .* GiB used/.test(document.querySelector('.memory').textContent)")
    assert page.evaluate("document.getElementById('dashboards').hidden")
    assert page.faults == []


@needs_chromium
def test_kv_on_the_move_is_shown_for_ten_seconds(simulated: RunningStack, page: Page) -> None:
    """Here neither tiers nor loans are at work: the module is asked itself."""
    look(page, simulated)
    none = dict.fromkeys(("host", "disk", "peer"), 0)
    row = {"id": "worker-0", "written": none, "hits": none}
    owed = {"creditor": "worker-1", "debtor": "worker-0", "blocks": 4, "host_blocks": 0}
    moved = {"kind": "moved", "unix_s": 3, "source": "worker-0", "target": "worker-1", "moved_bytes": 7}
    pictures = [
        {"unix_s": 1, "workers": [row], "debts": [owed]},
        {"unix_s": 2, "workers": [row | {"written": none | {"host": 5}}], "debts": []},
        {"unix_s": 3, "workers": [row], "debts": [], "events": [moved, moved | {"failed": "late"}]},
    ]
    page.size(390, 844, is_phone=True)
    shown = page.evaluate(
        "import('/ui/moving.js').then(({Moving}) => { const ul = document.getElementById('moving-rows');"
        f"const moving = new Moving(ul); {json.dumps(pictures)}.forEach((one) => moving.take(one));"
        "ul.parentElement.hidden = !moving.draw(4); const told = [...ul.children].map((r) => r.textContent);"
        "return JSON.stringify([told, document.documentElement.scrollWidth, moving.draw(14)]); })"
    )
    rows = ["worker-17 bytes of one sequence", "worker-14 blocks given back", " devicehost5 blocks"]
    assert json.loads(shown) == [[f"worker-0{row}" for row in rows], 390, False]


@needs_chromium
def test_pause_holds_the_page_still_and_nothing_is_missed(simulated: RunningStack, page: Page) -> None:
    look(page, simulated)
    page.evaluate("document.getElementById('pause').click()")
    page.until("document.getElementById('state-text').textContent.startsWith('held still')")
    shown = page.evaluate("document.body.dataset.heard")
    preempted = gauges(simulated, "kvasir_fleet_preemptions")[""]
    ask_all(simulated)
    assert page.evaluate("document.body.dataset.heard") == shown
    page.evaluate("document.getElementById('pause').click()")
    page.until(f"Number(document.body.dataset.heard) > {shown}")
    if gauges(simulated, "kvasir_fleet_preemptions")[""] > preempted:
        page.until("/preempted/.test(document.getElementById('event-rows').textContent)")
    assert page.faults == []


@needs_chromium
def test_it_asks_for_a_key_and_takes_one(simulated: RunningStack, page: Page) -> None:
    page.open(f"{simulated.url}/ui")
    page.until("document.getElementById('key-form')?.hidden === false")
    page.type(simulated.key)
    page.press("Enter")
    page.until("Number(document.body.dataset.heard) > 1")
    assert page.evaluate("document.getElementById('key-form').hidden") is True


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_phone_in_either_theme(simulated: RunningStack, page: Page, theme: str) -> None:
    look(page, simulated, f"&theme={theme}")
    page.size(390, 844, is_phone=True)
    page.until("document.documentElement.scrollWidth <= 390")
    assert page.evaluate("(s => s.scrollWidth <= s.clientWidth)(document.querySelector('#latency .scroll'))")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (theme == "dark")
    page.evaluate("document.activeElement.blur()")
    for key in "/t ":  # a letter that somebody types by mistake does nothing (WCAG 2.1.4)
        page.press(key)
    assert page.evaluate("document.activeElement === document.body")
    page.evaluate("document.getElementById('theme').click()")
    page.until(f"document.documentElement.dataset.theme !== '{theme}'")
    assert page.faults == []


def test_data_are_the_admins_and_the_operators(simulated: RunningStack) -> None:
    assert get(f"{simulated.url}/ui")[0] == 200 and get(f"{simulated.url}/ui/vendor/uPlot.LICENSE")[0] == 200
    for path in ("/ui/stream", "/ui/workers/worker-0", "/ui/requests/req_1"):
        assert get(f"{simulated.url}{path}")[0] == 401
        assert get(f"{simulated.operator_url}{path}", host="evil.example")[0] == 403
    assert get(f"{simulated.operator_url}/ui/workers/worker-0")[0] == 200
    assert get(f"{simulated.url}/ui/../config.py", simulated.key)[0] == 404
    assert get(f"{simulated.url}/ui/%2e%2e/routes.py", simulated.key)[0] == 404
