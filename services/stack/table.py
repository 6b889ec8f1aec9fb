"""Child table of Kvasir: nats-server, six services, N workers."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from services.stack import nats_server
from services.stack.access import BusAccess
from services.stack.config import StackConfig
from services.stack.models import named
from services.stack.obstructions import check_override, free_port, gateway_hosts
from services.stack.probes import Probe, greeting, listens, reaches, seed_answers, serves
from services.stack.process import SeedLauncher, socket_fits, start_program
from services.stack.roll_call import RollCall, replies
from services.stack.rundir import ROOT, RunDirectory
from services.stack.supervisor import ChildSpec
from shared import subjects, watchdog
from shared.command_line import hint
from shared.config import ENV_CONFIG_FILE, ENV_PREFIX, SHARED_SETTINGS
from shared.errors import ConfigError
from shared.plugins import PLUGIN_SETTINGS, absolute, is_file

_MODEL_SERVICES = ("GATEWAY", "WORKER")
_ENGINE_MODULE = "services.worker.building"
"""Imports torch and transformers; workers need it to build an engine."""
_ARENAS = 2
"""Number of glibc malloc arenas per process. The default is up to eight per core, each of which keeps its
peak memory. Workers then grew for hours (docs/benchmarks/chaos.md)."""
_BUS, _BACKEND, _FRONT = 0, 1, 2
"""Stages: the gateway stops first, so that answers can finish; the bus stops last."""


TableMaker = Callable[..., list[ChildSpec]]
"""`kvasir_table`, or what tests build instead."""


@dataclass(frozen=True)
class Sources:
    """Where settings come from, the last one first: file, environment, command line."""

    config_file: Path | None
    overrides: Sequence[tuple[str, str, str]]
    """Section or instance, setting, value."""
    environ: Mapping[str, str]

    def value(self, instance: str, setting: str, **more: str) -> Any:
        """Return what the instance will be told, or None; `more` are variables that are set for it."""
        service = subjects.service_of(instance)
        variables = {**self.environ, **more, **self.environment(service, instance)}
        name = _variable(service, setting)
        said = [value for variable, value in variables.items() if variable.upper() == name and value]
        return said[-1] if said else self.in_file(service, setting)

    def in_file(self, section: str, setting: str) -> Any:
        """Return a setting of the file, or None. Services report unreadable files."""
        file = self.config_file or Path(self.environ.get(ENV_CONFIG_FILE) or os.devnull)
        try:
            content: Any = yaml.safe_load(file.read_bytes())
            for key in (section, *setting.split(".")):
                content = content.get(key)
            return content
        except (OSError, yaml.YAMLError, AttributeError):
            return None

    def environment(self, service: str, instance: str) -> dict[str, str]:
        """Return the variables of the command line's settings."""
        return {
            _variable(service if section == instance else section, setting): value
            for section, setting, value in self.overrides
            if section in (service, instance) or section in SHARED_SETTINGS
        }

    def policy_file(self, instance: str) -> dict[str, str]:
        """Return the absolute path of this service's policy file, because services run in another folder.
        Relative paths start at the current directory."""
        service = subjects.service_of(instance)
        found = self.value(instance, PLUGIN_SETTINGS[service]) if service in PLUGIN_SETTINGS else None
        if not isinstance(found, str) or not is_file(found):
            return {}
        return {_variable(service, PLUGIN_SETTINGS[service]): absolute(found)}

    @property
    def is_scaled(self) -> bool:
        """True if placement is configured to control the number of workers."""
        try:
            return TypeAdapter(bool).validate_python(self.value("placement-0", "scale"))
        except ValidationError:
            return False  # unset or invalid; placement reports the latter


def _variable(section: str, setting: str) -> str:
    return ENV_PREFIX + "__".join([section, *filter(None, setting.split("."))]).upper()


def kvasir_table(
    config: StackConfig, run: RunDirectory, *, port: int, access: BusAccess, sources: Sources, roll: RollCall
) -> list[ChildSpec]:
    """Return all children. Raise ConfigError."""
    _check_models(config)
    servers = nats_server.write_configs(run, config, access)
    shared_env = {
        **sources.environ,
        f"{ENV_PREFIX}GATEWAY__PORT": str(port),
        f"{ENV_PREFIX}GATEWAY__OPERATOR_PORT": str(config.operator_port),
        f"{ENV_PREFIX}GATEWAY__API_KEY_SHA256": json.dumps([access.credentials.api_key_sha256]),
        f"{ENV_PREFIX}GATEWAY__ADMIN_KEY_SHA256": json.dumps([access.credentials.api_key_sha256]),
        **_model_env(config),
    }
    if sources.in_file("gateway", "keys_file") is None:
        shared_env.setdefault(f"{ENV_PREFIX}GATEWAY__KEYS_FILE", str(run.keys_file))
    for setting in ("batches", "stored_responses"):
        if sources.in_file("gateway", setting) is None:
            file = run.path / f"{setting}.sqlite"
            shared_env.setdefault(f"{ENV_PREFIX}GATEWAY__{setting.upper()}", str(file))
    if config.schedulers > 1 and sources.in_file("scheduler", "shards") is None:
        shared_env.setdefault(f"{ENV_PREFIX}SCHEDULER__SHARDS", str(config.schedulers))
    if sources.config_file is not None:
        shared_env[ENV_CONFIG_FILE] = str(sources.config_file.resolve())
    shared_env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.workers)))
    shared_env.setdefault("MALLOC_ARENA_MAX", str(_ARENAS))
    if sources.in_file("predictor", "state_dir") is None:
        shared_env.setdefault(f"{ENV_PREFIX}PREDICTOR__STATE_DIR", str(run.path / "predictor"))
    instances = {name: subjects.service_of(name) for name in config.instances}
    instances = {name: service for name, service in instances.items() if service not in config.without}
    for section, setting, _ in sources.overrides:
        known = {*subjects.SERVICES, *instances, *SHARED_SETTINGS}
        if section not in known:
            raise ConfigError(f"--set {section}.{setting}: no section {section!r}{hint(section, [*known])}")
        if setting == "served_name":
            raise ConfigError("gateway and workers call the model the same: write --served-name NAME")
        if setting in ("port", "operator_port"):
            flag = f"--{setting.replace('_', '-')}"
            raise ConfigError(f"the stack looks for the gateway where it starts it: write {flag} PORT")
        check_override(section, setting)
    engines = {
        name: str(sources.value(name, "engine", **_model_env(config)) or "native")
        for name, service in instances.items()
        if service == "worker"
    }
    table = []
    for name, own in zip(servers, access.each(), strict=True):
        argv = (nats_server.binary(), "-c", str(run.nats_config(name)))
        greets = partial(greeting, own.config(subjects.OPERATOR))
        is_alone = len(servers) == 1
        ready: Probe = partial(listens, own.ports[0]) if is_alone else partial(reaches, greets, len(servers))
        table.append(ChildSpec(name, argv, dict(sources.environ), ready, greets, stage=_BUS))
    seed = run.path / "seed.sock"
    seed.unlink(missing_ok=True)
    preload = config.preload and socket_fits(seed)
    operator_ports = _operator_ports(config, port)
    if preload:
        modules = [f"services.{service}.service" for service in sorted({*instances.values()})]
        modules += [_ENGINE_MODULE] if "native" in engines.values() else []
        seed_argv = (sys.executable, "-m", "services.stack.seed", str(seed), *modules)
        answers = partial(seed_answers, seed)
        table.append(ChildSpec("seed", seed_argv, shared_env, partial(listens, seed), answers, stage=_BUS))
    together = 1 if sources.is_scaled else _workers_together(config, sources.overrides)
    for crew in _processes(instances, together):
        instance, service = crew[0], instances[crew[0]]
        front = service == "gateway"
        page = "/ready" if "scheduler" not in config.without else "/health"
        module, arguments = f"services.{service}", ("--instance", instance)
        is_apart = engines.get(instance) == "vllm"
        python = _vllm_python(config) if is_apart else sys.executable
        is_forked = preload and not is_apart
        env = (
            shared_env
            | _own_model(config, instance)
            | (_own_port(config, operator_ports[instance]) if front else {})
            | access.environment(instance)
            | _crew_env(crew, access)
            | sources.environment(service, instance)
            | sources.policy_file(instance)
        )
        table.append(
            ChildSpec(
                name=instance,
                argv=(python, "-m", module, *arguments),
                env=env,
                ready=partial(serves, operator_ports[instance], page, host=gateway_hosts(env)[1])
                if front
                else partial(replies, roll, service, crew),
                life=partial(watchdog.ask, instance),
                launch=SeedLauncher(seed, instance, module, arguments) if is_forked else start_program,
                stage=_FRONT if front else _BACKEND,
                instances=crew,
            )
        )
    return table


def _operator_ports(config: StackConfig, port: int) -> dict[str, int]:
    """Return the operator port of each gateway; the first is as configured."""
    gateways = [name for name in config.instances if subjects.service_of(name) == "gateway"]
    ports = [config.operator_port]
    while len(ports) < len(gateways):
        ports.append(free_port(taken={port, *ports}))
    return dict(zip(gateways, ports, strict=True))


def _own_port(config: StackConfig, operator_port: int) -> dict[str, str]:
    """Return the ports of one of several gateways, which share the client port."""
    return {
        f"{ENV_PREFIX}GATEWAY__OPERATOR_PORT": str(operator_port),
        f"{ENV_PREFIX}GATEWAY__SHARES_PORT": json.dumps(config.gateways > 1),
    }


def _vllm_python(config: StackConfig) -> str:
    """Return vLLM's Python. Raise ConfigError if it is missing."""
    python = ROOT / config.vllm_python
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"engine vllm runs in an environment of its own, and {python} is not there: run "
            "`make setup-vllm`, or name a Python that has vLLM with --vllm-python",
            param="engine",
        )
    return str(python)


_ALONE_UP_TO = 8
_CREWS = 4


def _workers_together(config: StackConfig, overrides: Sequence[tuple[str, str, str]]) -> int:
    """Return the number of workers per process: one, except for identical simulated workers."""
    are_alike = not any(section.startswith("worker-") for section, _, _ in overrides)
    if config.engine != "simulated" or not are_alike or config.more_models:
        return 1
    if config.workers_per_process or config.workers <= _ALONE_UP_TO:
        return config.workers_per_process or 1
    return -(-config.workers // _CREWS)


def _processes(instances: Mapping[str, str], together: int) -> list[tuple[str, ...]]:
    """Return the groups of instances that share a process, in order."""
    workers = [name for name, service in instances.items() if service == "worker"]
    others = [(name,) for name, service in instances.items() if service != "worker"]
    return [*others, *(tuple(workers[at : at + together]) for at in range(0, len(workers), together))]


def _crew_env(crew: Sequence[str], access: BusAccess) -> dict[str, str]:
    """Return additional variables for a process with several workers."""
    if len(crew) == 1:
        return {}
    passwords = {name: access.credentials.nats_passwords[name] for name in crew[1:]}
    return {
        f"{ENV_PREFIX}WORKER__COUNT": str(len(crew)),
        f"{ENV_PREFIX}WORKER__PASSWORDS": json.dumps(passwords),
    }


def parse_override(text: str) -> tuple[str, str, str]:
    """Parse `section.key.sub=value` to (section, key.sub, value). Raise ConfigError."""
    name, equals, value = text.partition("=")
    section, dot, setting = name.strip().partition(".")
    if not equals or not section or (not dot and section not in ("log_level", "log_format")):
        raise ConfigError(f"--set {text!r}: write it as section.setting=value, as in worker.kv_blocks=64")
    return section.strip(), setting.strip(), value.strip()


def _model_env(config: StackConfig) -> dict[str, str]:
    """Return location, name and engine of the model, for the gateway and all workers."""
    settings: dict[str, str] = {}
    if config.model is not None:
        settings["SERVED_NAME"], settings["MODEL"] = named(config.model)
    if config.served_name is not None:
        settings["SERVED_NAME"] = config.served_name
    engine = {} if config.engine is None else {f"{ENV_PREFIX}WORKER__ENGINE": config.engine}
    return engine | {
        f"{ENV_PREFIX}{section}__{key}": value
        for section in _MODEL_SERVICES
        for key, value in settings.items()
    }


def _check_models(config: StackConfig) -> None:
    """Raise ConfigError for several models that this stack cannot serve."""
    count = 1 + len(config.more_models)
    if count > 1 and config.model is None:
        raise ConfigError("several models: name the first, too", param="model")
    if config.workers < count:
        raise ConfigError(f"{count} models need as many workers: write --workers {count}", param="workers")


def _own_model(config: StackConfig, instance: str) -> dict[str, str]:
    """Return the further models for a gateway, or a worker's own model if there are several."""
    further = [named(text) for text in config.more_models]
    if not further:
        return {}
    if subjects.service_of(instance) == "gateway":
        return {f"{ENV_PREFIX}GATEWAY__MODELS": json.dumps(dict(further))}
    turn = _turn(config, instance) if subjects.service_of(instance) == "worker" else 0
    if turn == 0:
        return {}
    name, model = further[turn - 1]
    return {f"{ENV_PREFIX}WORKER__MODEL": model, f"{ENV_PREFIX}WORKER__SERVED_NAME": name}


def _turn(config: StackConfig, worker: str) -> int:
    """Return the index of the worker's model; workers take the models in turn."""
    return int(worker.rpartition("-")[2]) % (1 + len(config.more_models))


def workers_by_model(config: StackConfig) -> dict[str, list[str]]:
    """Return worker names by served model. With one model, the key is empty."""
    workers = [name for name in config.instances if subjects.service_of(name) == "worker"]
    if not config.more_models or config.model is None:
        return {"": workers}
    first = config.served_name or named(config.model)[0]
    names = [first, *(named(text)[0] for text in config.more_models)]
    return {
        model: [worker for worker in workers if _turn(config, worker) == turn]
        for turn, model in enumerate(names)
    }
