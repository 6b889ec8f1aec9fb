"""Settings that every service has, independent of their source."""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared import subjects
from shared.model_files import name_of, source_of

ENV_PREFIX = "KVASIR_"


class BusConfig(BaseModel):
    """Connection to NATS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(
        default="nats://127.0.0.1:4222",
        description="address of nats-server; of a cluster those of all servers, with commas, nearest first",
    )
    user: str | None = Field(default=None, description="user name, if the server wants one")
    password: SecretStr | None = Field(default=None, description="password of that user")
    tls_ca: str | None = Field(
        default=None, description="PEM file: who signed the server's certificate [with tls://: the system's]"
    )
    tls_cert: str | None = Field(
        default=None, description="PEM file: own certificate, if the server wants one"
    )
    tls_key: str | None = Field(default=None, description="PEM file: the key of that certificate")
    tls_handshake_first: bool = Field(
        default=False, description="encrypt before the first byte; nats-server needs handshake_first for it"
    )
    connect_timeout_s: float = Field(
        default=10.0, gt=0, description="give up the first connection after this"
    )
    drain_timeout_s: float = Field(
        default=2.0, ge=0, description="at the end, let running handlers finish for this long"
    )
    ping_interval_s: float | None = Field(
        default=None,
        gt=0,
        description="a server that misses two pings is given up; unset: 5, or 0.4 where there are others",
    )
    max_payload_bytes: int = Field(
        default=8 * 1024 * 1024,
        gt=1024,
        description="refuse larger messages even if the server would take them",
    )
    outbound_buffer_bytes: int = Field(
        default=2 * 1024 * 1024, gt=0, description="what may wait to be sent while disconnected"
    )

    @field_validator("url")
    @classmethod
    def _has_scheme(cls, url: str) -> str:
        addresses = url.split(",")
        if not all(re.match(r"(nats|tls|ws|wss)://[^/\s]+", address) for address in addresses):
            raise ValueError("write it as nats://HOST:PORT, several as nats://A:4222,nats://B:4222")
        if len({address.partition(":")[0] for address in addresses}) > 1:
            raise ValueError("encrypt all servers of a cluster or none: write tls:// or nats:// before each")
        return url

    @property
    def urls(self) -> list[str]:
        """Addresses of all servers."""
        return self.url.split(",")

    @property
    def ping_s(self) -> float:
        """Seconds between pings. Only where there is another server does a quick verdict help."""
        return self.ping_interval_s or (0.4 if "," in self.url else 5.0)


class TracesConfig(BaseModel):
    """Request spans for an OpenTelemetry collector."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field(
        default="",
        description="OTLP over HTTP, such as http://127.0.0.1:4318; empty: no spans; needs "
        "deploy/locks/traces.txt",
    )
    share: float = Field(
        default=1.0, ge=0, le=1, description="of requests that come without a trace, so many begin one"
    )

    @field_validator("endpoint")
    @classmethod
    def _has_scheme(cls, endpoint: str) -> str:
        if endpoint and not re.match(r"https?://[^/\s]+", endpoint):
            raise ValueError("write it as http://HOST:PORT")
        return endpoint


class ServiceConfig(BaseSettings):
    """Base of every service's configuration. Direct construction reads neither environment nor files."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX)

    instance: str = Field(default="", description="id of this process, one token of a subject [<service>-0]")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severe line logged"
    )
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: console on a terminal, else JSON"
    )
    bus: BusConfig = Field(default=BusConfig(), description="NATS")
    traces: TracesConfig = Field(default=TracesConfig(), description="OpenTelemetry")

    def check(self) -> None:
        """Check combinations of settings before anything is started or loaded.

        Raise ConfigError. Must not wait for the network or import large packages."""

    def check_start(self) -> None:
        """Check what only the start of a stack requires, not the restart of a process.

        Raise ConfigError."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_instance(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("instance"):
            service = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__.removesuffix("Config")).lower()
            return {**values, "instance": f"{service}-0"}
        return values

    @field_validator("instance")
    @classmethod
    def _is_subject_token(cls, instance: str) -> str:
        return subjects.checked_id(instance)


class ModelServiceConfig(ServiceConfig):
    """Base for services that use the model: its location and its name for clients.

    Gateway and workers must agree on the name, so both share these settings and defaults."""

    model: str = Field(
        default="models/tiny_chat", description="folder or hub id (ORG/NAME@REVISION) of the model"
    )
    served_name: str = Field(
        default="",
        description="what clients call the model, alike in gateway and workers [the last part of `model`]",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_served_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("served_name"):
            model = values.get("model") or cls.model_fields["model"].default
            return {**values, "served_name": name_of(str(model))}
        return values

    def check(self) -> None:
        source_of(self.model)
