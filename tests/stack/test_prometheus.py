"""A real Prometheus reads a stack's metrics: vLLM's dashboards and ours have data in every panel.

`make dashboards` fetches Debian's Prometheus for it; without one these tests are skipped.
"""

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.stack.obstructions import free_port
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import ROOT, RunningStack
from tests.tasks import ran

MONITORING = ROOT / "deploy" / "monitoring"
FETCHED = ROOT / ".prometheus" / "usr" / "bin"


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(FETCHED))


pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(program("prometheus") is None, reason="no Prometheus: `make dashboards` fetches one"),
]
OF_MODEL = '{model_name="$model_name"}'
OF_MODELS = '{model_name=~"$Deployment_id"}'
WHILE, ALL = "[$__rate_interval]", "[$__range]"


def quantiles(metric: str, selector: str, over: str, by: str = "le") -> list[str]:
    return [
        f"histogram_quantile({share}, sum by({by}) (rate(vllm:{metric}_bucket{selector}{over})))"
        for share in (0.99, 0.95, 0.9, 0.5)
    ]


def mean(metric: str, selector: str = "", over: str = WHILE) -> str:
    sums, counts = (f"vllm:{metric}_{part}{selector}{over}" for part in ("sum", "count"))
    return f"rate({sums}) / rate({counts})"


LATENCIES = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
MAIN_DASHBOARD = [
    *(each for metric in LATENCIES for each in (*quantiles(metric, OF_MODEL, WHILE), mean(metric, OF_MODEL))),
    *(f"rate(vllm:{kind}_tokens_total{OF_MODEL}{WHILE})" for kind in ("prompt", "generation")),
    *(f"vllm:num_requests_{state}{OF_MODEL}" for state in ("running", "waiting")),
    f"vllm:kv_cache_usage_perc{OF_MODEL}",
    *(
        f"sum by(le) (increase(vllm:request_{kind}_tokens_bucket{OF_MODEL}{WHILE}))"
        for kind in ("prompt", "generation")
    ),
    f"sum by(finished_reason) (increase(vllm:request_success_total{OF_MODEL}{WHILE}))",
    *(
        f"rate(vllm:request_{what}_sum{OF_MODEL}{WHILE})"
        for what in (
            "queue_time_seconds",
            "prefill_time_seconds",
            "decode_time_seconds",
            "max_num_generation_tokens",
        )
    ),
]
"""What panels of vLLM's `examples/observability/prometheus_grafana/grafana.json` ask for."""
QUERY_STATISTICS = [
    f"sum by (model_name) (rate(vllm:request_success_total{OF_MODELS}{WHILE}))",
    f"sum(rate(vllm:request_success_total{OF_MODELS}{WHILE}))",
    *quantiles("e2e_request_latency_seconds", OF_MODELS, WHILE, "le, model_name"),
    *quantiles("request_prompt_tokens", OF_MODELS, WHILE, "le, model_name"),
    f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{OF_MODELS}{WHILE}))",
    f"sum(rate(vllm:prompt_tokens_total{OF_MODELS}{WHILE}))"
    f" / sum(rate(vllm:request_success_total{OF_MODELS}{WHILE}))",
    *(
        f"sum by (model_name) (rate(vllm:{kind}_tokens_total{OF_MODELS}{WHILE}))"
        for kind in ("prompt", "generation")
    ),
    *(f"sum(rate(vllm:{kind}_tokens_total{OF_MODELS}{WHILE}))" for kind in ("prompt", "generation")),
]
"""Of `dashboards/grafana/query_statistics.json` beside it."""
PERFORMANCE_STATISTICS = [
    *(mean(metric) for metric in LATENCIES),
    *(each for metric in LATENCIES for each in quantiles(metric, "", ALL)),
    *(
        f"(sum(increase(vllm:{metric}_sum{ALL})) / sum(increase(vllm:{metric}_count{ALL})))"
        for metric in LATENCIES
    ),
    *quantiles("inter_token_latency_seconds", "", WHILE),
    *(f"rate(vllm:{kind}_tokens_total{WHILE})" for kind in ("prompt", "generation")),
]
"""Of `dashboards/grafana/performance_statistics.json` beside it."""
VLLM = {"grafana": MAIN_DASHBOARD, "query_statistics": QUERY_STATISTICS}
VLLM["performance_statistics"] = PERFORMANCE_STATISTICS


class Prometheus:
    """One that scrapes a stack, by our configuration with another target and a shorter interval."""

    def __init__(self, folder: Path, target: str) -> None:
        said = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        said["global"] = {"scrape_interval": "500ms", "scrape_timeout": "400ms"}
        said["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(said))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                str(program("prometheus")),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def ask(self, expression: str, model: str) -> list[dict[str, Any]]:
        """As a panel of Grafana would."""
        for variable, value in (
            ("$model_name", model),
            ("$Deployment_id", ".*"),
            ("$__rate_interval", "20s"),
            ("$__range", "60s"),
        ):
            expression = expression.replace(variable, value)
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=20) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return list(said["data"]["result"])

    def until_scraped(self, model: str, *, times: int, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            try:
                found = self.ask("count_over_time(vllm:num_requests_running[60s])", model)
            except OSError:
                found = []
            if found and float(found[0]["value"][1]) >= times:
                return
            time.sleep(0.2)
        raise AssertionError(f"{self.url} has not scraped {times} times within {within_s} s")


@pytest.fixture(scope="module")
def prometheus(simulated: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen the stack before, under and after load."""
    folder = tmp_path_factory.mktemp("prometheus-data") / "data"
    running = Prometheus(folder, simulated.operator_url.removeprefix("http://"))
    try:
        running.until_scraped(simulated.model.name, times=3)
        asyncio.run(load(simulated))
        time.sleep(2.5)  # the scheduler's next announcement, and a scrape after it
        yield running
    finally:
        running.close()


async def load(simulated: RunningStack) -> None:
    prompts = mixed(24, longest_words=200, seed=8)
    questions = [Question(prompt, {"seed": seed, "max_tokens": 100}) for seed, prompt in enumerate(prompts)]
    for _ in range(2):
        answers = await simulated.client().ask_all(questions)
        assert all(answer.complete for answer in answers)


def has_data(series: list[dict[str, Any]]) -> bool:
    """At least one number. Buckets nobody fell into are zeros, and quantiles of nothing are none."""
    return any(math.isfinite(float(each["value"][1])) for each in series)


@pytest.mark.parametrize("dashboard", VLLM)
def test_all_of_a_vllm_dashboard_has_data(
    prometheus: Prometheus, simulated: RunningStack, dashboard: str
) -> None:
    asked = VLLM[dashboard]
    assert [each for each in asked if not has_data(prometheus.ask(each, simulated.model.name))] == []


def test_every_expression_of_our_dashboard_has_data(prometheus: Prometheus, simulated: RunningStack) -> None:
    board = json.loads((MONITORING / "grafana" / "dashboards" / "kvasir.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(asked) > 20
    assert [each for each in asked if not has_data(prometheus.ask(each, simulated.model.name))] == []


def test_labels_are_where_dashboards_look_for_them(prometheus: Prometheus, simulated: RunningStack) -> None:
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/label/model_name/values", timeout=20) as answer:
        assert json.load(answer)["data"] == [simulated.model.name]


def test_a_gateway_tells_no_other_services_metrics(prometheus: Prometheus, simulated: RunningStack) -> None:
    """`kvasir_worker_…` there is what heartbeats say, by worker."""
    series = prometheus.ask('{__name__=~"kvasir_(worker|scheduler|predictor|placement|ledger)_.+"}', "")
    assert series
    assert {
        each["metric"]["__name__"] for each in series if not {"worker", "creditor"} & each["metric"].keys()
    } == set()


def test_the_configuration_is_what_prometheus_takes() -> None:
    done = ran([str(program("promtool")), "check", "config", str(MONITORING / "prometheus.yml")])
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_name_in_our_documentation_is_there(prometheus: Prometheus) -> None:
    table = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)(?:\{[a-z_]+\})?`", row.split("|")[1])}
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/label/__name__/values", timeout=20) as answer:
        there = json.load(answer)["data"]
    assert len(named) > 20
    assert {name for name in named if not any(each.startswith(f"vllm:{name}") for each in there)} == set()
