"""The plan of a serve run, from its flags."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.live.serve.prompts import Prompts, drawn_prompts, read_prompts, with_prefixes
from bench.live.serve.sides import BASE, ORACLE, OURS, PEER, WITH_VLLM, kv_tokens_for
from shared.errors import ConfigError

_BLOCK = 32


@dataclass(frozen=True)
class Plan:
    """Settings of one run."""

    model: Path
    peer: str
    predictor: str
    with_oracle: bool
    mechanisms: tuple[str, ...]
    """Sides that are `kvasir` with one more mechanism."""
    workers: int
    """Workers of each side."""
    engines: bool
    """Whether our workers' engine is vLLM, too."""
    prompts: Prompts
    kv_tokens: int
    max_tokens: int
    requests: int
    low_requests: int
    beyond_requests: int
    tolerance: float
    repeats: int
    alternations: int
    price_turns: int
    """Turns of bare vLLM against policy `vllm` on vLLM workers, in bursts and at low load."""
    slo_scale: float
    budget_s: float

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the sides, the reference first."""
        peer = (PEER,) if self.peer == "vllm" else ()
        return (*peer, BASE, OURS, *((ORACLE,) if self.with_oracle else ()), *self.mechanisms)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest possible request, in whole blocks."""
        longest = max(map(len, (*self.prompts.lessons, *self.prompts.measured))) + self.max_tokens
        return -(-longest // _BLOCK) * _BLOCK

    def identity(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with the first: all but budget, turns and
        tolerance."""
        told = asdict(self)
        for name in ("prompts", "budget_s", "tolerance", "repeats"):
            del told[name]
        for name in ("alternations", "price_turns", "beyond_requests"):
            del told[name]
        told["mechanisms"] = list(self.mechanisms)
        counts = {"lessons": len(self.prompts.lessons), "pool": len(self.prompts.measured)}
        first = list(self.prompts.measured[0])
        return {**told, **counts, "model": self.model.name, "first_prompt": first}


def plan_of(context: Context) -> Plan:
    """Return the plan. Raises ConfigError for unavailable prompts, or a KV too small for the longest
    request."""
    flags, quick = context.arguments, context.quick
    model = Path(flags.model).resolve()
    if not (model / "config.json").exists():
        raise ConfigError(f"{flags.model} is no folder with a config.json", param="model")
    max_tokens = flags.max_tokens or (96 if quick else 400)
    prompts = _prompts(context, model, max_tokens)
    if flags.prefix_tokens:
        draw = context.random("prefixes")
        prompts = with_prefixes(prompts, draw, count=flags.prefixes, tokens=flags.prefix_tokens)
    kv_tokens = flags.kv_tokens or kv_tokens_for(prompts.mean_request_tokens, flags.kv_requests)
    plan = Plan(
        model=model,
        peer=flags.peer or ("none" if quick else "vllm"),
        predictor=flags.predictor or ("histogram" if quick else "regressor"),
        with_oracle=(flags.oracle or ("no" if quick else "yes")) == "yes",
        mechanisms=tuple(flags.mechanisms),
        workers=flags.workers,
        engines=flags.engines,
        prompts=prompts,
        kv_tokens=-(-kv_tokens // _BLOCK) * _BLOCK,
        max_tokens=max_tokens,
        requests=flags.requests or (24 if quick else 500),
        low_requests=flags.low_requests or (6 if quick else 100),
        beyond_requests=flags.beyond_requests or (24 if quick else 2000),
        tolerance=flags.tolerance or (0.5 if quick else 0.05),
        repeats=flags.repeats,
        alternations=flags.alternations or (1 if quick else 5),
        price_turns=flags.price_turns or (1 if quick else 5),
        slo_scale=flags.slo_scale,
        budget_s=flags.budget_s or (20.0 if quick else 3600.0),
    )
    if plan.workers < 1 or (plan.workers > 1 and plan.peer != "none"):
        raise ConfigError(
            "several workers are compared among our own policies: write --peer none", param="workers"
        )
    impossible = sorted(set(plan.mechanisms) - set(WITH_VLLM)) if plan.engines else []
    if impossible:
        raise ConfigError(f"workers with engine vllm cannot have {', '.join(impossible)}", param="mechanisms")
    if plan.context_tokens > plan.kv_tokens:
        raise ConfigError(
            f"a request may come to {plan.context_tokens} tokens, the KV holds {plan.kv_tokens}: raise "
            "--kv-requests or lower --max-tokens",
            param="kv_requests",
        )
    return plan


def _prompts(context: Context, model: Path, max_tokens: int) -> Prompts:
    flags, quick = context.arguments, context.quick
    lessons, pool = flags.lessons or (24 if quick else 600), flags.pool or (24 if quick else 500)
    if flags.trace is not None:
        return read_prompts(flags.trace, model, lessons=lessons, measured=pool, max_tokens=max_tokens)
    return drawn_prompts(
        context.random("prompts"),
        model,
        lessons=lessons,
        measured=pool,
        max_tokens=max_tokens,
        story_share=flags.story_share,
    )
