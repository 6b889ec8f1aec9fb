"""Settings of the stack."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from shared.config import ServiceConfig

SOFT_STATE_SERVICES = ("predictor", "placement", "ledger")


class StackConfig(ServiceConfig):
    """Settings of the section `stack`."""

    @property
    def instances(self) -> tuple[str, ...]:
        """All instance names, replaced services (`without`) included. Each is a NATS user."""
        workers = (f"worker-{number}" for number in range(self.workers))
        gateways = (f"gateway-{number}" for number in range(self.gateways))
        schedulers = (f"scheduler-{number}" for number in range(self.schedulers))
        return (*gateways, *schedulers, *(f"{service}-0" for service in SOFT_STATE_SERVICES), *workers)

    port: int = Field(
        default=8080, ge=0, le=65535, description="port of the HTTP gateway; 0 takes a free one"
    )
    gateways: int = Field(
        default=1,
        ge=1,
        le=16,
        description="how many gateways; they share the port and take over from one that dies",
    )
    schedulers: int = Field(
        default=1,
        ge=1,
        le=16,
        description="how many schedulers; each leads a shard, unless scheduler.shards says otherwise",
    )
    operator_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="port of the first gateway's operator listener (/health, /ready, /metrics); 0 takes a "
        "free one, shown by `status`; other gateways always take free ones",
    )
    nats_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of nats-server; unset: 4222, or a free one if that is taken",
    )
    nats_cluster: int = Field(
        default=1,
        ge=1,
        le=5,
        description="how many nats-servers, as a cluster: the bus outlives one of three, two of five; their "
        "ports follow nats_port",
    )
    logs_mb: int = Field(default=256, ge=8, description="most megabytes of all logs")
    nats_max_payload_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=64 * 1024,
        le=64 * 1024 * 1024,
        description="maximum message size of nats-server; the services' own limit is bus.max_payload_bytes",
    )
    nats_max_connections: int = Field(
        default=4096, ge=16, description="maximum number of connections to nats-server; a worker has two"
    )
    nats_max_memory_store_bytes: int = Field(
        default=16 * 1024 * 1024, gt=0, description="memory limit of JetStream, which stores the leases"
    )
    nats_max_file_store_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024 * 1024, description="disk limit of JetStream; the stack uses none"
    )
    tls: bool = Field(
        default=False,
        description="encrypt the bus, with a new certificate at every start unless nats_tls_cert is set",
    )
    nats_tls_cert: Path | None = Field(default=None, description="PEM file: certificate of nats-server")
    nats_tls_key: Path | None = Field(default=None, description="PEM file: key of that certificate")
    nats_tls_ca: Path | None = Field(
        default=None, description="PEM file: authority that signed it; unset: one that the system trusts"
    )
    workers: int = Field(default=2, ge=1, le=1024, description="how many workers")
    workers_per_process: int = Field(
        default=0,
        ge=0,
        le=256,
        description="simulated workers per process; 0: one for up to 8 workers, else a quarter of all",
    )
    engine: Literal["native", "vllm", "simulated"] | None = Field(
        default=None,
        description="vllm: run the model in vLLM; simulated: only simulate its timing, for experiments; "
        "unset: as in worker.engine",
    )
    vllm_python: Path = Field(
        default=Path(".venv-vllm/bin/python"),
        description="Python of workers with engine vllm; a relative path starts at the repository",
    )
    model: str | None = Field(
        default=None,
        description="folder, hub id or name of a pulled model, optionally after NAME=; unset: the services' "
        "default; repeatable: workers take the models in turn",
    )
    more_models: tuple[str, ...] = Field(
        default=(), description="further models, written like `model`; workers take all models in turn"
    )
    served_name: str | None = Field(
        default=None, description="name of the model for clients; unset: the last part of its folder or id"
    )
    without: tuple[Literal["scheduler", "predictor", "placement", "ledger"], ...] = Field(
        default=(), description="services not to start, because you run your own"
    )
    preload: bool = Field(
        default=True, description="fork services from one process that has imported their modules"
    )
    start_timeout_s: float = Field(
        default=180.0, gt=0, description="if not ready after this time, the start has failed"
    )
    stop_grace_s: float = Field(default=8.0, gt=0, description="time between SIGTERM and SIGKILL")

    @field_validator("nats_cluster")
    @classmethod
    def _is_odd(cls, servers: int) -> int:
        if servers % 2 == 0:
            raise ValueError(
                f"a majority of {servers} servers outlives no more deaths than one of {servers - 1}: write "
                f"{servers - 1} or {servers + 1}"
            )
        return servers
