"""The command line: `kvasir up | down | status | logs | explain | record | chat | …`."""

import argparse
import asyncio
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, get_args

from rich.console import Console

from services.stack.config import StackConfig
from services.stack.obstructions import Obstructed
from services.stack.rundir import DEFAULT_RUN_DIR, ROOT, RunDirectory
from services.stack.table import Sources, TableMaker, kvasir_table, parse_override
from shared import log
from shared.command_line import Parser
from shared.config import load, load_with_origins
from shared.errors import ConfigError, KvasirError
from shared.messages.sequence import ServiceClass
from shared.release import VERSION

_DEFAULT_FILE = ROOT / "deploy" / "local.yaml"
_METAVARS = {"served_name": "NAME"}
_STACK_FLAGS = (
    "port", "operator_port", "nats_port", "nats_cluster", "workers", "gateways", "schedulers", "served_name",
    "start_timeout_s", "stop_grace_s",
)  # fmt: skip


_OF_ALL = ("command", "program", "run_dir", "words")
"""Arguments of every command."""
_KEY_OPTIONS = ("class", "weight", "max_concurrent", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True)
class Program:
    """Root module and child table of the commands; tests replace both."""

    module: str = "services"
    make_table: TableMaker = kvasir_table


def main(argv: Sequence[str] | None = None, program: Program = Program()) -> int:  # immutable
    """Run one command. Return its exit code: 0 done, 1 failed, 2 invalid settings, 3 obstructed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["experiment"]:
        return _experiment(words)
    arguments = _parser().parse_args(words, argparse.Namespace(program=program, words=words))
    logging.getLogger(log.ROOT).addHandler(logging.NullHandler())  # no log lines on the console
    console = Console(stderr=False, soft_wrap=True)
    try:
        code: int = arguments.command(arguments, console)
        return code
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Obstructed as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except KvasirError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(Parser):
    """Parser that reports errors in one line starting with `error: `, with exit code 2."""

    def complain(self, message: str) -> NoReturn:
        print(f"error: {message}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvasir",
        description="Serve large language models whose KV cache is one shared, tiered, lendable resource.",
        epilog="`kvasir COMMAND --help` lists the options of a command. To run one service alone: python -m "
        "services.NAME --help, where NAME is gateway, scheduler, predictor, placement, ledger or worker.",
    )
    parser.add_argument("--version", action="version", version=f"kvasir {VERSION}")
    commands = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")
    common = _Parser(add_help=False)
    common.add_argument(
        "--run-dir", type=Path, default=DEFAULT_RUN_DIR, help="state, logs and credentials [%(default)s]"
    )

    up = commands.add_parser("up", parents=[common], help="start the stack; Ctrl-C stops it")
    up.add_argument("--detach", action="store_true", help="return once it is ready and leave it running")
    up.add_argument(
        "--if-needed", action="store_true", help="with --detach: do nothing if a stack is ready already"
    )
    up.add_argument("--config", type=Path, help="YAML file with settings [deploy/local.yaml, if it exists]")
    for name in _STACK_FLAGS:
        field = StackConfig.model_fields[name]
        default = "" if field.default is None else f" [{field.default:g}]"
        flag = f"--{name.removesuffix('_s').replace('_', '-')}"
        unit = _METAVARS.get(name, "SECONDS" if name.endswith("_s") else "N")
        up.add_argument(flag, dest=name, metavar=unit, help=f"{field.description}{default}")
    up.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="FOLDER_OR_HUB_ID",
        help=StackConfig.model_fields["model"].description,
    )
    up.add_argument(
        "--without",
        action="append",
        choices=get_args(get_args(StackConfig.model_fields["without"].annotation)[0]),
        help="do not start this service, because you run your own; repeatable",
    )
    up.add_argument(
        "--engine",
        choices=("native", "vllm", "simulated"),
        help=StackConfig.model_fields["engine"].description,
    )
    up.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="Python of workers with engine vllm: one that has vLLM 0.26 or later [.venv-vllm/bin/python]",
    )
    up.add_argument(
        "--tls", action="store_const", const=True, help=StackConfig.model_fields["tls"].description
    )
    up.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="set for a service or for one instance: worker.kv_blocks=64, worker-1.kv_blocks=64; repeatable",
    )
    up.set_defaults(command=_up)

    down = commands.add_parser("down", parents=[common], help="stop the stack")
    down.set_defaults(command=_call("down"))

    roll = commands.add_parser(
        "roll", parents=[common], help="restart every process in turn, while it serves"
    )
    roll.add_argument("names", nargs="*", metavar="NAME", help="process (worker-0) or service (worker) [all]")
    roll.add_argument("--code", type=Path, metavar="FOLDER", help="checkout to start them from [this one]")
    roll.set_defaults(command=_call("rolling", "roll"))

    status = commands.add_parser(
        "status", parents=[common], help="say whether all is well; with NAME, details"
    )
    status.add_argument(
        "names", nargs="*", metavar="NAME", help="process (worker-0), service (worker), or all"
    )
    status.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    status.set_defaults(command=_call("status"))

    logs = commands.add_parser("logs", parents=[common], help="print what the processes have logged")
    logs.add_argument("names", nargs="*", metavar="NAME", help="only these processes: worker-0 gateway-0")
    logs.add_argument("--follow", "-f", action="store_true", help="keep printing new lines until Ctrl-C")
    logs.add_argument("--lines", "-n", type=int, default=40, metavar="N", help="lines to print [%(default)s]")
    logs.set_defaults(command=_call("logs"))

    explain = commands.add_parser("explain", parents=[common], help="show where the time of a request went")
    explain.add_argument("request_id", metavar="REQUEST_ID", help="from the header x-kvasir-request-id")
    explain.add_argument(
        "--events", action="store_true", dest="with_events", help="also print every recorded event"
    )
    explain.add_argument(
        "--what-if",
        nargs="*",
        dest="otherwise",
        metavar="POLICY|+N",
        help="simulate when the request would have ended under another policy or with N more workers [both]",
    )
    explain.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    explain.set_defaults(command=_call("explain"))

    record = commands.add_parser("record", parents=[common], help="write what happened lately to a file")
    record.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines")
    record.add_argument(
        "--perfetto", action="store_true", dest="as_trace", help="write Chrome trace events instead"
    )
    record.set_defaults(command=_call("record"))

    env = commands.add_parser("env", parents=[common], help="print what clients read: eval $(kvasir env)")
    env.set_defaults(command=_env)

    config = commands.add_parser("config", help="print the settings in force, and where each comes from")
    config.add_argument("sections", nargs="*", metavar="SECTION", help="only these: stack gateway worker …")
    config.add_argument("--all", action="store_true", help="also print settings that have their default")
    config.add_argument("--markdown", action="store_true", help="describe every setting, as docs/settings.md")
    config.add_argument("--config", type=Path, help="YAML file with settings [deploy/local.yaml, if any]")
    config.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as of `up`; repeatable"
    )
    config.set_defaults(command=_config)

    doctor = commands.add_parser("doctor", parents=[common], help="say what this machine lacks for a model")
    doctor.add_argument("--model", metavar="FOLDER_OR_HUB_ID", help="model to look at [as `up` would serve]")
    doctor.add_argument("--workers", type=int, metavar="N", help="how many workers [as `up` would start]")
    doctor.add_argument("--port", type=int, metavar="N", help="port of the HTTP gateway [as `up` would take]")
    doctor.set_defaults(command=_doctor)

    chat = commands.add_parser("chat", parents=[common], help="chat with the model; with QUESTION, ask once")
    chat.add_argument("question", nargs="*", metavar="QUESTION", help="ask this and exit")
    chat.add_argument("--model", metavar="NAME", help="one of several [the first]")
    chat.add_argument("--system", help="system message")
    chat.add_argument("--temperature", type=float, help="0 is greedy [the model's]")
    chat.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    chat.set_defaults(command=_call("chat"))

    models = commands.add_parser("models", help="list local models; pull and remove models")
    models.set_defaults(command=_models, action="list")
    actions = models.add_subparsers(metavar="pull|remove")
    pull = actions.add_parser("pull", help="copy a model from a folder, or download one from the hub")
    pull.add_argument("source", metavar="NAME_FOLDER_OR_HUB_ID")
    pull.add_argument("--name", help="name of the model [the last part of its folder or id]")
    pull.set_defaults(action="pull")
    remove = actions.add_parser("remove", help="delete the files of a pulled model")
    remove.add_argument("name", metavar="NAME")
    remove.set_defaults(action="remove")

    credentials = commands.add_parser("credentials", parents=[common], help="add a NATS user for an instance")
    credentials.add_argument("name", help="SERVICE-ID, such as worker-2; or operator")
    credentials.set_defaults(command=_call("nats_server", "credentials"))
    _add_keys(commands.add_parser("keys", parents=[common], help="add, list and revoke API keys"))
    commands.add_parser("experiment", help="compare parts in a grid of runs, or repeat what somebody cites")
    completion = commands.add_parser("completion", help="print a completion script for your shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(command=_completion)
    return parser


def _call(module: str, function: str = "") -> Callable[[argparse.Namespace, Console], int]:
    """Return the command that calls a function of `services.stack`, by default the one named as its module.
    The command's own arguments are the function's, by name."""

    def command(arguments: argparse.Namespace, console: Console) -> int:
        own = {name: value for name, value in vars(arguments).items() if name not in _OF_ALL}
        called = getattr(import_module(f"services.stack.{module}"), function or module)
        code = called(RunDirectory(arguments.run_dir), console, **own)
        return int(asyncio.run(code) if asyncio.iscoroutine(code) else code)

    return command


def _experiment(words: Sequence[str]) -> int:
    """Run `python -m bench experiment`, with its flags, from any folder."""
    if not (ROOT / "bench").is_dir():
        print("error: experiments need a clone of Kvasir: git clone, make dev, kvasir", file=sys.stderr)
        return 2
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    return subprocess.call(
        [sys.executable, "-m", "bench", *words], env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    )


def _completion(arguments: argparse.Namespace, console: Console) -> int:
    import shtab

    print(shtab.complete(_parser(), arguments.shell))
    return 0


def _add_keys(keys: argparse.ArgumentParser) -> None:
    keys.add_argument("--file", type=Path, help="the gateway's keys_file [keys.json in the run directory]")
    keys.set_defaults(command=_keys, action="list")
    actions = keys.add_subparsers(metavar="add|list|revoke|hash")
    add = actions.add_parser("add", help="create a key; it is printed once and stored as a hash")
    add.add_argument("name", metavar="NAME", help="name of the tenant who holds it")
    add.add_argument("--class", choices=[str(each) for each in ServiceClass], help="class of its requests")
    add.add_argument("--weight", type=float, metavar="N", help="weight of its share within its class")
    add.add_argument("--max-concurrent", type=int, metavar="N", help="concurrent requests")
    add.add_argument("--requests-per-minute", type=float, metavar="N")
    add.add_argument("--tokens-per-minute", type=float, metavar="N", help="tokens of prompts and answers")
    add.set_defaults(action="add")
    actions.add_parser("list", help="names, limits and first digits of hashes").set_defaults(action="list")
    revoke = actions.add_parser("revoke", help="revoke a key")
    revoke.add_argument("name", metavar="NAME")
    revoke.set_defaults(action="revoke")
    actions.add_parser("hash", help="replace plain keys by their hashes").set_defaults(action="hash")


def _keys(arguments: argparse.Namespace, console: Console) -> int:
    """Add, list and revoke API keys while the stack runs; only hashes are stored."""
    from services.stack.display import say
    from shared import key_file

    run = RunDirectory(arguments.run_dir)
    path: Path = arguments.file or run.keys_file
    if arguments.file is None:
        run.create()
    match arguments.action:
        case "add":
            options = {name: getattr(arguments, name) for name in _KEY_OPTIONS}
            print(key_file.add(path, arguments.name, options))
        case "revoke":
            key_file.revoke(path, arguments.name)
            say(console, f"{arguments.name} gets in no more")
        case "hash":
            names = key_file.hash_plain(path)
            say(console, f"hashed: {', '.join(names)}" if names else "every key was hashed already")
        case _:
            for name, options in sorted(key_file.read(path).items()):
                shown = "  ".join(f"{each} {options[each]}" for each in _KEY_OPTIONS if each in options)
                say(console, f"{name:24} {str(options.get('sha256'))[:8]}…  {shown}".rstrip())
    return 0


def _up(arguments: argparse.Namespace, console: Console) -> int:
    from services.stack.up import up, up_detached

    program, sources = arguments.program, _sources(arguments)
    given = {name: getattr(arguments, name) for name in (*_STACK_FLAGS, "engine", "tls", "without")}
    given |= {"model": next(iter(arguments.model), None), "more_models": arguments.model[1:] or None}
    given["vllm_python"] = arguments.vllm_python and arguments.vllm_python.absolute()
    config = load(StackConfig, "stack", _flags(sources, given))
    run = RunDirectory(arguments.run_dir)
    if arguments.detach:
        words = [word for word in arguments.words if word not in ("--detach", "--if-needed")]
        return up_detached(run, program.module, words, console, if_needed=arguments.if_needed)
    config, sources = _with_default_model(config, sources, console)
    return asyncio.run(up(config, run, sources, program.make_table, console))


def _sources(arguments: argparse.Namespace) -> Sources:
    """Return where the settings of `up` come from, by the command's `--config` and `--set`."""
    file = getattr(arguments, "config", None) or (_DEFAULT_FILE if _DEFAULT_FILE.exists() else None)
    overrides = tuple(parse_override(text) for text in getattr(arguments, "set", ()))
    return Sources(file, overrides, os.environ)


def _flags(sources: Sources, given: Mapping[str, Any]) -> list[str]:
    """Return flags for `load`, without those that are None."""
    words = {
        name: value if isinstance(value, str | Path) else json.dumps(value) for name, value in given.items()
    }
    flags = [f"--{name}={word}" for name, word in words.items() if given[name] is not None]
    return [*(["--config", str(sources.config_file)] if sources.config_file else []), *flags]


def _with_default_model(
    config: StackConfig, sources: Sources, console: Console
) -> tuple[StackConfig, Sources]:
    """Return both with the default model if none is named and a worker computes it itself."""
    from services.stack import models
    from services.stack.display import say

    engine = config.engine or sources.value("worker-0", "engine") or "native"
    if (
        config.model
        or sources.value("worker-0", "model")
        or sources.value("gateway-0", "model")
        or engine != "native"
    ):
        return config, sources
    model = models.default()
    if model is None:
        remedy = f"./kvasir models pull {models.DEFAULT} fetches it (93 MB)"
        say(console, f"{models.DEFAULT} is not here, so Tiny Chat is served: {remedy}")
        return config, sources
    sets = (("gateway", "default_temperature", models.DEFAULT_TEMPERATURE), *sources.overrides)
    sources = replace(sources, overrides=sets)
    return config.model_copy(update={"model": model}), sources


def _env(arguments: argparse.Namespace, console: Console) -> int:
    from services.stack.display import running_state

    run = RunDirectory(arguments.run_dir)
    url, key = running_state(run)["url"], run.credentials().api_key
    for name, value in (
        ("OPENAI_BASE_URL", f"{url}/v1"),
        ("OPENAI_API_KEY", key),
        ("ANTHROPIC_BASE_URL", url),
        ("ANTHROPIC_API_KEY", key),
    ):
        print(f"export {name}={shlex.quote(value)};")
    return 0


def _config(arguments: argparse.Namespace, console: Console) -> int:
    from services.stack import settings

    if arguments.markdown:
        print("\n".join(settings.as_table()))
        return 0
    sources = _sources(arguments)
    stack = load_with_origins(StackConfig, "stack", _flags(sources, {}))
    found = settings.listed(
        list(settings.in_force(sources, *stack)), arguments.sections, with_defaults=arguments.all
    )
    for line in settings.as_text(found):
        print(line)
    if not found:
        print("every setting has its default; --all prints them")
    return 0


def _doctor(arguments: argparse.Namespace, console: Console) -> int:
    from services.stack.doctor import examined

    sources = _sources(arguments)
    given = {name: getattr(arguments, name) for name in ("workers", "port")}
    config = load(StackConfig, "stack", _flags(sources, given))
    model = arguments.model or config.model or sources.value("worker-0", "model")
    findings = list(examined(RunDirectory(arguments.run_dir), model, config.workers, config.port))
    for finding in findings:
        print(finding)
    return 1 if any(finding.is_fatal for finding in findings) else 0


def _models(arguments: argparse.Namespace, console: Console) -> int:
    from services.stack import models
    from services.stack.display import say

    match arguments.action:
        case "pull":
            found = models.pull(arguments.source, arguments.name, models.from_hub)
            say(console, f"{found.name} is here, {found.size_bytes / 1e6:.1f} MB: up --model {found.name}")
        case "remove":
            found = models.remove(arguments.name)
            say(console, f"{found.name} is gone, {found.size_bytes / 1e6:.1f} MB")
        case _:
            here = models.known()
            for found in here:
                say(console, f"{found.name:30} {found.size_bytes / 1e6:10.1f} MB  {found.problem}".rstrip())
            for name, (origin, size_mb, licence) in models.TO_PULL.items():
                if name not in {found.name for found in here}:
                    say(console, f"{name:30} {size_mb:10.1f} MB  to pull from {origin}, {licence}")
    return 0
