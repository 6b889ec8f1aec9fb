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
        if not isinstance(options, Mapping):
            return options
        names = sorted(field.alias or name for name, field in cls.model_fields.items())
        if unknown := sorted(str(name) for name in options if name not in names):
            raise ValueError(f"a key has no option {unknown[0]!r}; it has: {', '.join(names)}")
        classes = [str(each) for each in ServiceClass]
        if options.get("class", classes[0]) not in classes:
            raise ValueError(f"no class {options['class']!r}; there are: {', '.join(classes)}")
        return options

    def tenant(self, name: str) -> Tenant:
        return Tenant(name=name, service_class=self.service_class, weight=self.weight)

    def quota(self) -> Quota:
        return Quota(self.max_concurrent, self.requests_per_minute, self.tokens_per_minute)


class GatewayConfig(ModelServiceConfig):
    """Section `gateway`."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    shares_port: bool = Field(False, description="other gateways of this machine may share the port")
    operator_host: str = Field("127.0.0.1", description="for /health, /ready and /metrics, without a key")
    operator_port: int = Field(8081, ge=0, le=65535, description="port of that listener; 0 takes a free one")
    api_key_sha256: tuple[KeyHash, ...] = Field((), description="SHA-256 of each accepted API key, in hex")
    keys: dict[KeyName, KeyConfig] = Field(
        {},
        description="further keys, by tenant: {team-a: {sha256: HEX, class: guaranteed, weight: 2}}; class is"
        " guaranteed, standard or sheddable; limits: max_concurrent, requests_per_minute, tokens_per_minute",
    )
    keys_file: str = Field("", description="JSON file of further keys, as `services keys` writes; reloaded")
    admin_key_sha256: tuple[KeyHash, ...] = Field((), description="SHA-256 of each key for /ui, in hex")
    dashboards: str = Field("", pattern="^$|^https?://", description="address of Grafana, linked from /ui")
    model: str = Field("models/tiny_chat", description="folder, or hub id as ORG/NAME@REVISION")
    models: dict[ModelName, str] = Field({}, description="further models, by the name that workers serve")
    aliases: dict[ModelName, ModelName] = Field({}, description="other names, as in {gpt-4o: tiny_chat}")
    max_body_bytes: int = Field(4 * 1024 * 1024, gt=0, description="longest request body")
    max_header_bytes: int = Field(16 * 1024, gt=0, description="longest request line and headers")
    receive_timeout_s: float = Field(10.0, gt=0, description="for the headers, and again for the body")
    write_timeout_s: float = Field(60.0, gt=0, description="for a client to take in more of its answer")
    keep_alive_s: float = Field(30.0, gt=0, description="an idle connection is kept this long")
    max_connections: int = Field(8192, gt=0, description="open; above it, the longest idle one is closed")
    max_connections_per_address: int = Field(
        2048,
        gt=0,
        description="the same from one address (IPv6: one /64); behind a proxy set it to max_connections",
    )
    sse_keep_alive_s: float = Field(15.0, gt=0, description="a stream that is idle this long sends a comment")
    request_timeout_s: float | None = Field(None, gt=0, description="default X-Request-Timeout; unset: none")
    max_request_timeout_s: float = Field(3600.0, gt=0, description="longest X-Request-Timeout that is taken")
    shutdown_grace_s: float = Field(
        5.0, ge=0, description="for answers in progress after SIGTERM; the process ends within 2 s more"
    )
    cors_origins: tuple[str, ...] = Field((), description="origins whose pages may call this API; * is all")
    embedding_pooling: Literal["auto", "last", "mean"] = Field(
        "auto",
        description="state of the last token, or the mean of all (a step for each); auto: as the model's "
        "1_Pooling/config.json says, else last",
    )
    stored_responses: str = Field(
        "", description="SQLite file for stored responses; empty: none; `up`: in its run directory"
    )
    stored_responses_mb: int = Field(
        64, ge=1, description="of stored responses, for each API key; the oldest leave"
    )
    stored_responses_days: float = Field(30.0, gt=0, description="for which they are kept at most")
    batches: str = Field(
        "",
        description="SQLite file for /v1/files and /v1/batches; empty: neither; `up`: in its run directory",
    )
    batches_mb: int = Field(256, ge=1, description="of files, for each API key")
    batches_days: float = Field(30.0, gt=0, description="for which files and ended batches are kept")
    resume_s: float = Field(
        60.0, gt=0, description="an answer that can be asked for again is kept this long without a reader"
    )
    resume_mb: int = Field(64, ge=1, description="of such answers, and as much of other gateways'")
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "ignore", description="fields and tools without effect: named in x-kvasir-ignored, or refused"
    )
    max_messages: int = Field(4096, ge=1, description="messages and content parts in one chat")
    max_n: int = Field(16, ge=1, le=128, description="choices per request")
    max_sequences_per_request: int = Field(128, ge=1, description="prompts times choices in one request")
    max_active_sequences: int = Field(4096, ge=1, description="in progress; more are refused with 429")
    max_waiting_tokenizations: int = Field(2048, ge=1, description="requests waiting to be tokenized")
    tokenizer_threads: int = Field(2, ge=1, description="threads that tokenize")
    default_max_tokens: int | None = Field(
        None, ge=1, description="of a chat without limit; unset: what fits"
    )
    default_temperature: float = Field(1.0, ge=0, le=2, description="of a request that gives none")
    admit_timeout_s: float = Field(10.0, gt=0, description="for a scheduler to take a request before 503")
    submit_deadline_s: float = Field(2.0, gt=0, description="for one answer of the scheduler")
    fetch_deadline_s: float = Field(1.0, gt=0, description="for one answer of a worker")
    frame_timeout_s: float = Field(3.0, gt=0, description="of silence; then a sequence is submitted again")
    worker_timeout_s: float = Field(3.0, gt=0, description="a worker without heartbeat for this long is lost")
    scheduler_timeout_s: float = Field(3.0, gt=0, description="a scheduler unheard for this long is away")
    give_up_s: float = Field(60.0, gt=0, description="a sequence nobody answers for fails after this")
    absence_s: float = Field(8.0, gt=0, description="off the bus; then waiting sequences are moved")
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
                text = f"{alias!r} is to be {name!r}, which is none of {', '.join(sorted(served))}"
                raise ConfigError(text, param="aliases")
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
        unnamed = {digest: Tenant(name=f"key-{digest[:8]}") for digest in digests}
        return unnamed | {key.sha256: key.tenant(name) for name, key in self.keys.items()}

    def of_models(self) -> list["GatewayConfig"]:
        """Return one configuration per model, with its `served_name` and `model`; the gateway's own first."""
        served = {self.served_name: self.model, **self.models}
        return [
            self.model_copy(update={"served_name": name, "model": model}) for name, model in served.items()
        ]
