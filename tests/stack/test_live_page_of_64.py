"""The live page of 64 workers under load: it keeps up, shows all of them, and says what /metrics says."""

import asyncio
import re
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.chromium import EXECUTABLE, Page, browser
from tests.stack.client import Question
from tests.stack.conftest import stack_of
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack
from tests.stack.test_live_page import gauges, look

WORKERS = 64
pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium (apt-get install chromium)"),
]
SETTINGS = ("worker.kv_blocks=64", "worker.simulated.speed=0.5")
fleet = stack_of("fleet", workers=WORKERS, settings=SETTINGS, flags=("--engine", "simulated"))


def test_it_keeps_up_with_64_workers_and_says_what_metrics_say(fleet: RunningStack, tmp_path: Path) -> None:
    prompts = mixed(300, longest_words=200, seed=5)
    questions = [Question(prompt, {"seed": seed, "max_tokens": 150}) for seed, prompt in enumerate(prompts)]
    load = threading.Thread(target=lambda: asyncio.run(fleet.client().ask_all(questions)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as page:
        look(page, fleet)
        load.start()
        page.until(f"document.querySelectorAll('.worker').length === {WORKERS}")
        page.until("Number(document.querySelector('[data-tile=running] b').textContent) > 32")
        page.call("Performance.enable", timeDomain="threadTicks")
        busy_s, heard, began_s = _busy_s(page.call("Performance.getMetrics")), _heard(page), time.monotonic()
        time.sleep(5.0)
        took_s = time.monotonic() - began_s
        page.screenshot(tmp_path / "64-workers.png", whole=True)
        pictures = _heard(page) - heard
        share = (_busy_s(page.call("Performance.getMetrics")) - busy_s) / took_s
        assert pictures / took_s > 1.5, f"{pictures} pictures in {took_s:.1f} s"
        assert share < 0.6, f"its thread takes {share:.0%} of a core ({pictures} pictures)"
        load.join()
        page.until("document.querySelector('[data-tile=running] b').textContent === '0'")
        time.sleep(1.0)
        blocks = gauges(fleet, "kvasir_worker_kv_blocks")
        for worker in (f"worker-{number}" for number in range(WORKERS)):
            title = page.evaluate(f"document.querySelector('[data-worker={worker}]').title")
            shown = [int(number) for number in re.findall(r"\d+", title)]
            assert shown[:4] == [blocks[f"{worker} {place}"] for place in "used evictable free total".split()]
        assert page.faults == []


def _heard(page: Page) -> int:
    return int(page.evaluate("Number(document.body.dataset.heard)"))


def _busy_s(metrics: dict[str, list[dict[str, float | str]]]) -> float:
    """Of CPU that the page's main thread has used, since it began."""
    return next(float(each["value"]) for each in metrics["metrics"] if each["name"] == "TaskDuration")
