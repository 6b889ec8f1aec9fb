"""The gateway's settings."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from services.gateway.core.quotas import Quota
from services.gateway.text.templates import check_template
from shared.config import ModelServiceConfig
from shared.errors import ConfigError
from shared.messages.sequence import ServiceClass, Tenant
from shared.model_files import source_of

KeyHash = Annotated[str, StringConstraints(pattern=re.compile(r"^[0-9a-f]{64}$"))]


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]


_SHOWN = 8
"""Digits of a digest in names for people."""
KeyName = Annotated[str, StringConstraints(pattern=re.compile(r"^[A-Za-z0-9_-]{1,64}$"))]


class KeyConfig(BaseModel):
    """One API key, whose holder is a tenant (docs/tenants.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    sha256: KeyHash = Field(description="SHA-256 of the key, in hex")
    service_class: ServiceClass = Field(ServiceClass.STANDARD, alias="class")
    weight: float = Field(1.0, ge=0.01, le=100, description="of its share among those of its class")
    max_concurrent: int | None = Field(None, ge=1, description="requests that are answered at once")
    requests_per_minute: float | None = Field(None, gt=0, description="as many at once at most")
    tokens_per_minute: float | None = Field(None, gt=0, description="of prompts and answers")

    @model_validator(mode="before")
    @classmethod
    def _names_exist(cls, options: object) -> object:
        """Reject unknown options and classes with a message that lists the known ones."""
        if not isinstance(options, Mapping):
            return options
        names = ("class", "max_concurrent", "requests_per_minute", "sha256", "tokens_per_minute", "weight")
        unknown = sorted(str(name) for name in options if name not in names)
        if unknown:
            raise ValueError(f"a key has no option {unknown[0]!r}; it has: {', '.join(names)}")
        classes = [str(each) for each in ServiceClass]
        if options.get("class", classes[0]) not in classes:
            raise ValueError(f"no class {options['class']!r}; there are: {', '.join(classes)}")
        return options

    def tenant(self, name: str) -> Tenant:
        """Return the tenant of requests with this key."""
        return Tenant(name=name, service_class=self.service_class, weight=self.weight)

    def quota(self) -> Quota:
        """Return the key's quota."""
        return Quota(self.max_concurrent, self.requests_per_minute, self.tokens_per_minute)


class GatewayConfig(ModelServiceConfig):
    """Section `gateway`."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    shares_port: bool = Field(
        False, description="other gateways of this machine listen on the same port; the system deals out"
    )
    operator_host: str = Field(
        "127.0.0.1", description="address of the operator's listener: /health, /ready, /metrics, no key"
    )
    operator_port: int = Field(
        8081, ge=0, le=65535, description="port of the operator's listener; 0 takes a free one"
    )
    api_key_sha256: tuple[KeyHash, ...] = Field(
        (), description="SHA-256 of each accepted API key, in hex; none means that every request is refused"
    )
    keys: dict[KeyName, KeyConfig] = Field(
        {},
        description="further keys, by tenant: {team-a: {sha256: HEX, class: guaranteed, weight: 2}}; class is"
        " guaranteed, standard or sheddable; limits: max_concurrent, requests_per_minute, tokens_per_minute",
    )
    keys_file: str = Field(
        "",
        description="JSON file of further keys, which `services keys` writes; read again when it changes",
    )

    admin_key_sha256: tuple[KeyHash, ...] = Field(
        (),
        description="SHA-256 of each key that may also see the live page at /ui, in hex; the operator's "
        "listener shows it without a key",
    )

    model: str = Field(
        "models/tiny_chat",
        description="folder or hub id (ORG/NAME@REVISION) whose tokenizer and chat template are used",
    )

    models: dict[ModelName, str] = Field(
        {}, description="further models, by the names that clients and their workers call them"
    )
    aliases: dict[ModelName, ModelName] = Field(
        {}, description="other names for models, as in {gpt-4o: tiny_chat}; answers say the model's own"
    )

    max_body_bytes: int = Field(4 * 1024 * 1024, gt=0, description="longest request body")
    max_header_bytes: int = Field(16 * 1024, gt=0, description="longest request line and headers")
    receive_timeout_s: float = Field(
        10.0, gt=0, description="for the headers, and again for the body, to arrive"
    )
    write_timeout_s: float = Field(60.0, gt=0, description="for a client to take in more of its answer")
    keep_alive_s: float = Field(30.0, gt=0, description="an idle connection is kept this long")
    max_connections: int = Field(
        8192, gt=0, description="open connections; above it the longest idle one gives way"
    )
    max_connections_per_address: int = Field(
        2048,
        gt=0,
        description="the same from one address (IPv6: one /64); behind a proxy set it to max_connections",
    )
    sse_keep_alive_s: float = Field(
        15.0, gt=0, description="a stream with nothing to send for this long sends a comment"
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        description="for a whole answer when the client sets no X-Request-Timeout; unset: no limit",
    )
    max_request_timeout_s: float = Field(3600.0, gt=0, description="longest X-Request-Timeout that is taken")
    shutdown_grace_s: float = Field(
        5.0,
        ge=0,
        description="running answers may go on this long after SIGTERM, then they end with an error; the "
        "process ends 2 s later at the latest, which fits into the 10 s that docker stop gives",
    )

    cors_origins: tuple[str, ...] = Field(
        (), description="origins whose pages in a browser may call this API; * is all of them"
    )
    embedding_pooling: Literal["auto", "last", "mean"] = Field(
        "auto",
        description="an embedding is the last token's state, or the mean of all tokens', which takes a step "
        "for each; auto: as the model's 1_Pooling/config.json says, else last",
    )
    stored_responses: str = Field(
        "",
        description="SQLite file in which answers of /v1/responses are kept, as `store` and "
        "`previous_response_id` ask for; empty: nothing is stored",
    )
    stored_responses_mb: int = Field(64, ge=1, description="of them, for each API key; the oldest leave")
    stored_responses_days: float = Field(30.0, gt=0, description="so long they are kept at most")
    resume_s: float = Field(
        60.0,
        gt=0,
        description="an answer that its client can ask for again (Idempotency-Key, or a response's id) is "
        "kept so long after its end, or after its client has left",
    )
    resume_mb: int = Field(
        64,
        ge=1,
        description="of such answers, and as much again of other gateways'; the oldest leave",
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "ignore",
        description="what becomes of a request with a field or a tool that this server does not know: that "
        "has no effect and is named in the header x-kvasir-ignored, or the request is refused",
    )
    max_messages: int = Field(
        4096, ge=1, description="messages in one chat; of a content in parts each part counts as one"
    )
    max_n: int = Field(16, ge=1, le=128, description="choices per request")
    max_sequences_per_request: int = Field(128, ge=1, description="prompts times choices in one request")
    max_active_sequences: int = Field(
        4096, ge=1, description="sequences in progress; more are refused with 429"
    )
    max_waiting_tokenizations: int = Field(2048, ge=1, description="requests waiting to be tokenized")
    tokenizer_threads: int = Field(2, ge=1, description="threads that tokenize")
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="cap on a chat answer that sets no limit; unset means what is left of the context",
    )

    admit_timeout_s: float = Field(10.0, gt=0, description="for a scheduler to take a request before 503")
    submit_deadline_s: float = Field(2.0, gt=0, description="for one answer of the scheduler")
    fetch_deadline_s: float = Field(1.0, gt=0, description="for one answer of a worker")
    frame_timeout_s: float = Field(
        3.0, gt=0, description="without a sign of life a sequence is submitted again"
    )
    worker_timeout_s: float = Field(3.0, gt=0, description="a worker without heartbeat for this long is lost")
    scheduler_timeout_s: float = Field(3.0, gt=0, description="a scheduler unheard for this long is away")
    give_up_s: float = Field(60.0, gt=0, description="a sequence nobody answers for fails after this")
    absence_s: float = Field(
        8.0, gt=0, description="off the bus or stopped for this long, waiting sequences are handed over anew"
    )
    report_interval_s: float = Field(0.5, gt=0, description="between the gateway's own heartbeats")

    def check(self) -> None:
        """Raise ConfigError, also for duplicate names and for an alias of an unknown model."""
        super().check()
        self.check_keys()
        for host, setting in ((self.host, "host"), (self.operator_host, "operator_host")):
            if host.startswith("["):
                raise ConfigError(f"{setting} {host}: write an IPv6 address without brackets", param=setting)
        if self.served_name in self.models:
            raise ConfigError(f"two models are called {self.served_name!r}", param="models")
        served = {self.served_name, *self.models}
        for model in self.models.values():
            source_of(model)
        for alias, name in self.aliases.items():
            if name not in served:
                known = ", ".join(sorted(served))
                raise ConfigError(f"{alias!r} is to be {name!r}, which is none of {known}", param="aliases")
            if alias in served:
                raise ConfigError(f"{alias!r} is a model already", param="aliases")

    def check_start(self) -> None:
        for model in (self.model, *self.models.values()):
            check_template(model)

    def check_keys(self) -> None:
        """Raise ConfigError for a duplicate key."""
        named = [key.sha256 for key in self.keys.values()]
        if len({*named, *self.api_key_sha256}) < len(named) + len(set(self.api_key_sha256)):
            raise ConfigError("a key is there twice: each has one tenant", param="keys")

    def tenants(self) -> dict[str, Tenant]:
        """Return the tenants by key digest. An unnamed key is named by its digest's beginning."""
        digests = (*self.api_key_sha256, *self.admin_key_sha256)
        unnamed = {digest: Tenant(name=f"key-{digest[:_SHOWN]}") for digest in digests}
        return unnamed | {key.sha256: key.tenant(name) for name, key in self.keys.items()}

    def of_models(self) -> list["GatewayConfig"]:
        """Return one configuration per model, with its `served_name` and `model`; the gateway's own first."""
        served = {self.served_name: self.model, **self.models}
        return [
            self.model_copy(update={"served_name": name, "model": model}) for name, model in served.items()
        ]
