"""The scheduler's settings."""

import json
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from services.scheduler.core.rules import MoveRules, ReliefRules, Rules
from services.scheduler.policy import check_policy, policy_names
from services.scheduler.policy.contract import REFUSE_WAIT_S, PolicySettings, QueueOrder
from services.scheduler.policy.relief import LADDER
from shared.command_line import hint
from shared.config import ServiceConfig
from shared.shards import MOST_SHARDS


class SchedulerConfig(ServiceConfig):
    """Settings of section `scheduler`. Durations are in seconds."""

    policy: str = Field(
        default="kvasir", description=f"batching policy: {', '.join(policy_names())}, or FILE.py:CLASS"
    )
    policy_options: dict[str, Any] = Field(default={}, description="options of this policy")
    queue: Literal["policy", "arrival", "work"] = Field(
        default="policy", description="order in which sequences wait for a worker"
    )
    chunked_prefill: bool = Field(default=True, description="cut prompts to the token budget")
    max_batch_sequences: int = Field(
        default=64, ge=1, description="sequences that run at once in one worker; unset: more on GPUs"
    )
    token_budget: int = Field(
        default=512, ge=1, description="tokens per step, prompt chunks included; unset: more on GPUs"
    )
    max_steps: int = Field(default=8, ge=1, description="steps of one plan while nothing can change")
    worker_timeout_s: float = Field(default=2.0, gt=0, description="a worker silent for so long is lost")
    gateway_timeout_s: float = Field(
        default=10.0, gt=0, description="sequences of a gateway silent for so long end"
    )
    max_queued: int = Field(default=4096, ge=1, description="sequences that may wait; more are refused")
    refuse_wait_s: float = Field(
        default=REFUSE_WAIT_S,
        ge=0,
        description="a new request that would wait longer is refused at once (429, Retry-After); 0: never",
    )
    lease_ttl_s: float = Field(
        default=3.0, gt=0.5, description="a standby takes over after so long without a renewal"
    )
    shards: int = Field(
        default=1,
        ge=1,
        le=MOST_SHARDS,
        description="parts of the fleet, each led by one scheduler; the same number for all",
    )
    tick_s: float = Field(default=0.05, gt=0, le=0.25, description="interval of the clock's events")
    relief: bool = Field(
        default=True, description="where a worker's memory runs out, take the cheapest way to free some"
    )
    relief_off: tuple[str, ...] = Field(
        default=(), description=f"ways to free memory that are not taken, of {', '.join(LADDER)}"
    )
    most_moves: int = Field(default=16, ge=0, description="migrations at once; 0: none")
    shadow_from_s: float = Field(
        default=0.2,
        ge=0,
        description="running sequences are copied to a second worker once recomputing them takes so long; "
        "0: never",
    )

    @field_validator("relief_off")
    @classmethod
    def _rungs_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in LADDER:
                raise ValueError(f"{name!r} is no way to free memory{hint(name, LADDER)}")
        return names

    @field_validator("policy_options")
    @classmethod
    def _options_are_typed(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Parse option values that are JSON; `--set scheduler.policy_options.pad=0.2` passes text."""
        for name, value in options.items():
            if isinstance(value, str):
                with suppress(ValueError):
                    options = {**options, name: json.loads(value)}
        return options

    @model_validator(mode="after")
    def _budget_covers_the_batch(self) -> "SchedulerConfig":
        if self.token_budget < self.max_batch_sequences:
            raise ValueError("token_budget must be at least max_batch_sequences: each takes one token a step")
        return self

    def check(self) -> None:
        check_policy(self.policy, self.rules().settings)

    def rules(self) -> Rules:
        """Return the core's rules from this configuration."""
        return Rules(
            settings=PolicySettings(
                chunked_prefill=self.chunked_prefill,
                max_batch_sequences=self.max_batch_sequences,
                token_budget=self.token_budget,
                max_steps=self.max_steps,
                options=self.policy_options,
            ),
            sized_by_workers=self.model_fields_set.isdisjoint({"max_batch_sequences", "token_budget"}),
            queue=None if self.queue == "policy" else QueueOrder(self.queue),
            worker_timeout_s=self.worker_timeout_s,
            gateway_timeout_s=self.gateway_timeout_s,
            max_queued=self.max_queued,
            refuse_wait_s=self.refuse_wait_s,
            moves=MoveRules(most_at_once=self.most_moves),
            shadow_from_s=self.shadow_from_s,
            relief=ReliefRules(enabled=self.relief, switched_off=frozenset(self.relief_off)),
        )
