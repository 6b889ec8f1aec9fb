"""A request of a stack as one trace at a collector: gateway, scheduler, predictor, placement, worker.

The collector is an HTTP server that reads OTLP's protobuf; the spans come from the services' own processes.
"""

import asyncio
import json
import re
import signal
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from tests.otlp import Collector, Sent
from tests.patience import STACK_PATIENCE_S, until
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
HOPS = set("sequence queued SubmitSequence PredictLength PlaceSequences compute prefill decode".split())


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector().serving() as serving:
        yield serving


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[RunningStack]:
    settings = (f"traces.endpoint={collector.url}", "placement.log_level=debug")
    with running_stack(tmp_path_factory.mktemp("traces") / "run", settings=settings) as running:
        yield running


async def ask(stack: RunningStack, trace_id: str, **fields: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {stack.key}", "traceparent": f"00-{trace_id}-{1:016x}-01"}
    body = {"model": "tiny_chat", "messages": [{"role": "user", "content": "Tell me a story."}], **fields}
    async with httpx.AsyncClient(base_url=stack.url, timeout=STACK_PATIENCE_S) as http:
        return await http.post("/v1/chat/completions", json=body, headers=headers)


def routes(stack: RunningStack) -> list[str]:
    """The workers that placement has chosen, in order."""
    lines = (stack.run_dir / "logs" / "placement-0.log").read_text().splitlines()
    return [str(json.loads(line)["worker"]) for line in lines if '"route"' in line]


def named(spans: list[Sent], name: str) -> list[Sent]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


async def test_a_request_is_one_trace_through_all_services(stack: RunningStack, collector: Collector) -> None:
    trace_id = f"{0xABC1:032x}"
    answer = (await ask(stack, trace_id, max_tokens=20, temperature=0.5, top_p=0.9)).json()
    spans = collector.until(trace_id, "chat tiny_chat", *HOPS, within_s=STACK_PATIENCE_S)
    by_id = {span.span_id: span for span in spans}
    (request,) = named(spans, "chat tiny_chat")
    assert (request.service, request.kind, request.parent_id) == ("kvasir-gateway", 2, f"{1:016x}")
    said = request.attributes
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.request.model"] == "tiny_chat"
    assert said["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert said["gen_ai.response.finish_reasons"] == [answer["choices"][0]["finish_reason"]]
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.max_tokens"]) == (0.5, 20)
    assert said["http.response.status_code"] == 200 and request.events == ("accepted", "first token")
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    given = {name for span in spans for name in span.attributes if name.startswith("gen_ai.")}
    assert given <= known and len(given) > 10 and re.fullmatch(r"req_[0-9a-f]{32}", said["kvasir.request_id"])

    above = {span.name: by_id[span.parent_id].name for span in spans if span is not request}
    assert above == {
        "SubmitSequence": "chat tiny_chat",
        "sequence": "chat tiny_chat",
        "queued": "sequence",
        "PredictLength": "sequence",
        "PlaceSequences": "sequence",
        "compute": "chat tiny_chat",
        "prefill": "compute",
        "decode": "compute",
    }
    where = {span.name: span.service for span in spans}
    assert where["PredictLength"] == "kvasir-predictor" and where["PlaceSequences"] == "kvasir-placement"
    assert where["sequence"] == "kvasir-scheduler" and where["compute"] == "kvasir-worker"
    slack_ns = 5_000_000
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span is not request:
            assert span.start_ns >= request.start_ns - slack_ns
    (computed,) = named(spans, "compute")
    assert computed.end_ns <= request.end_ns + slack_ns
    assert computed.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    (sequence,) = named(spans, "sequence")
    assert {"placed", "started"} <= set(sequence.events)
    assert sequence.attributes["kvasir.worker"] == computed.attributes["kvasir.worker"] == computed.instance


async def test_what_is_resumed_stays_in_its_trace(stack: RunningStack, collector: Collector) -> None:
    """The worker that is killed sends nothing any more; the one that goes on does."""
    trace_id = f"{0xABC2:032x}"
    before = len(routes(stack))
    asking = asyncio.create_task(ask(stack, trace_id, max_tokens=600, ignore_eos=True))
    await until(lambda: len(routes(stack)) > before, STACK_PATIENCE_S)
    await asyncio.sleep(0.1)
    stack.signal(routes(stack)[-1], signal.SIGKILL)
    assert (await asking).status_code == 200
    spans = collector.until(trace_id, "chat tiny_chat", "compute", within_s=STACK_PATIENCE_S)
    attempts = [span.attributes["kvasir.attempt"] for span in named(spans, "compute")]
    assert max(attempts) > 1

    def sequences() -> list[int]:
        return [span.attributes["kvasir.attempt"] for span in named(collector.of(trace_id), "sequence")]

    await until(lambda: max(attempts) in sequences(), STACK_PATIENCE_S)  # each process sends when it does


async def test_a_refused_request_has_a_span_that_says_why(stack: RunningStack, collector: Collector) -> None:
    trace_id = f"{0xABC3:032x}"
    assert (await ask(stack, trace_id, max_tokens=-1)).status_code == 400
    (request,) = collector.until(trace_id, "chat")
    assert request.attributes["error.type"] and request.attributes["http.response.status_code"] == 400
    assert not request.is_error
