"""`python -m bench vllm-client`: `vllm bench serve --backend openai-chat` against our gateway. It is an
independent load generator: no request may fail, and latencies are as it reports them."""

import json
import os
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.kit.outcome import Outcome
from bench.kit.peers import vllm_binary
from bench.kit.provenance import ROOT
from bench.kit.stacks import Server
from bench.live.engine.served import Setup, start_kvasir
from shared.errors import InternalError

_DEADLINE_S = 480.0
_RESULT = "vllm-bench-serve.json"
_FIGURES = {
    "completed": "completed",
    "duration": "duration_s",
    "request_throughput": "requests_per_s",
    "output_throughput": "tok_s",
    "median_ttft_ms": "ttft_ms_p50",
    "p99_ttft_ms": "ttft_ms_p99",
    "median_itl_ms": "itl_ms_p50",
    "p99_itl_ms": "itl_ms_p99",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, help="[200; --quick 32]")
    parser.add_argument(
        "--rate", default="inf", help="requests per second, Poisson [%(default)s: all at once]"
    )
    parser.add_argument("--input-tokens", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--output-tokens", type=int, default=64, help="[%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if vLLM is not set up, InternalError if its tool gives no result."""
    flags = context.arguments
    requests = flags.requests or (32 if context.quick else 200)
    vllm_binary()
    setup = Setup(ROOT / "models" / "tiny_chat", 1, 64, 0, context.run_dir.resolve())
    with start_kvasir(setup) as served:
        context.say(f"gateway ready on port {served.target.port}; {requests} requests of vLLM's client")
        result = _bench_serve(context, served, setup.model, requests)
    failures = requests - int(result["completed"])
    figures = {
        ours: float(result[theirs]) for theirs, ours in _FIGURES.items() if result.get(theirs) is not None
    }
    return Outcome(figures, failures, notes=["latencies as vLLM's client reports them"])


def _bench_serve(context: Context, served: Server, model: Path, requests: int) -> dict[str, Any]:
    flags = context.arguments
    argv = [str(vllm_binary()), "bench", "serve", "--backend", "openai-chat"]
    argv += ["--endpoint", "/v1/chat/completions", "--base-url", f"http://127.0.0.1:{served.target.port}"]
    argv += ["--model", served.target.model, "--tokenizer", str(model), "--dataset-name", "random"]
    argv += ["--random-input-len", str(flags.input_tokens), "--random-output-len", str(flags.output_tokens)]
    argv += ["--num-prompts", str(requests), "--request-rate", flags.rate, "--seed", str(context.seed)]
    argv += ["--ignore-eos", "--save-result", "--result-dir", str(context.run_dir.resolve())]
    argv += ["--result-filename", _RESULT]
    env = {
        **os.environ,
        "OPENAI_API_KEY": served.target.key,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = context.run_dir / "vllm-bench-serve.log"
    with log.open("ab") as out:
        try:
            done = subprocess.run(
                argv, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=_DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise InternalError(
                f"vllm bench serve did not end within {_DEADLINE_S:g} s; see {log}"
            ) from error
    file = context.run_dir / _RESULT
    if done.returncode != 0 or not file.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise InternalError(f"vllm bench serve ended with code {done.returncode}:\n{tail}")
    result: dict[str, Any] = json.loads(file.read_text())
    return result
