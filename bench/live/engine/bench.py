"""`python -m bench engine --peer vllm`: tokens per second over HTTP, a core each, with alternating sides."""

from argparse import ArgumentParser, ArgumentTypeError
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from bench.kit.context import Context, check_resumable, read_cells
from bench.kit.cores import Cores
from bench.kit.models import RANDOM_SHAPES, checkpoint, plain_folder, vocabulary
from bench.kit.outcome import Outcome
from bench.kit.peers import FASTEST, VLLM_VARIANTS, start_vllm, vllm_serve
from bench.kit.stacks import start_all
from bench.live.engine import figures
from bench.live.engine.duel import BatchCell, Duel, cells, missing, run_turns
from bench.live.engine.sides import MAX_CONTEXT_TOKENS, Setup, quantised, start_kvasir, start_llamacpp
from shared.errors import ConfigError

_ALTERNATIONS, _QUICK_ALTERNATIONS = 5, 2


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--peer", choices=("vllm", "llamacpp"), default="vllm")
    add(
        "--gguf",
        type=_gguf_file,
        metavar="FILE",
        help="the same model for --peer llamacpp, its weights of any type [made of --model, F32]",
    )
    add(
        "--model",
        default="models/tiny_chat",
        help=f"folder, GGUF file, or {', '.join(RANDOM_SHAPES)}: random weights, made once [%(default)s]",
    )
    add(
        "--type", metavar="Q8_0", help="for both sides, of --peer llamacpp: made by llama-quantize [as it is]"
    )
    add("--batches", type=_numbers, help="concurrent requests [1,8,32,64]")
    add("--contexts", type=_numbers, help="prompt tokens [100,500; a random model: 100]")
    add("--output-tokens", type=int, help="of every answer [64; a random model: 32]")
    add("--alternations", type=int, help="[5]")
    add("--kv-gib", type=int, default=2, help="KV of each side [%(default)s]")
    add("--vllm", choices=sorted(VLLM_VARIANTS), default=FASTEST, help="how vLLM runs [%(default)s]")
    add("--budget-s", type=float, default=450.0, help="start nothing that would end later [%(default)g]")
    add("--resume", action="store_true", help="go on with the run in --out")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if the peer is not installed or a run cannot be resumed."""
    flags, quick = context.arguments, context.quick
    if (flags.gguf or flags.type) and flags.peer != "llamacpp":
        raise ConfigError("--gguf and --type are for --peer llamacpp", param="peer")
    random = flags.model in RANDOM_SHAPES
    workload = cells(
        flags.contexts or ([100] if quick or random else [100, 500]),
        flags.batches or ([1, 8] if quick else [1, 8, 32, 64]),
        flags.output_tokens or (32 if quick or random else 64),
    )
    alternations = flags.alternations or (_QUICK_ALTERNATIONS if quick else _ALTERNATIONS)
    turns = [(turn, cell) for turn in range(alternations) for cell in workload]
    model = checkpoint(flags.model)
    if flags.type:
        model = quantised(model, flags.type)
    peer = {"name": flags.peer, **({"weights": flags.gguf.name} if flags.gguf else {})}
    if flags.peer == "vllm":
        peer["variant"] = flags.vllm
    identity = {"model": model.name, "peer": peer, "kv_gib": flags.kv_gib, "seed": context.seed}
    identity["cells"] = [[cell.name, cell.output_tokens] for cell in workload]
    check_resumable(context, identity)
    todo = missing(turns, read_cells(context.run_dir))
    left_out = _measure(context, model, workload, todo) if todo else 0
    rows = read_cells(context.run_dir)
    made = figures.figures(rows, workload, flags.peer)
    if made:
        figures.draw(context.picture("ratios"), made, workload, flags.peer)
    notes = [
        "tok/s: output tokens / time from the first request to the last answer, prefill included",
        "a batch size's ratio is the geometric mean over its contexts, then the median over alternations",
        *([f"vLLM runs {flags.vllm}"] if flags.peer == "vllm" else []),
        *([f"{left_out} turns did not fit into --budget-s: --resume --out DIR goes on"] if left_out else []),
    ]
    return Outcome(
        figures=made,
        failures=sum(int(row["failures"]) for row in rows),
        tables=[figures.table(rows, workload, flags.peer)],
        notes=notes,
        headline=[name for name in made if name.startswith(("tok_s", "decode_ratio", "client_share"))],
        extra={"incomplete": left_out, "peer": peer},
    )


def _measure(
    context: Context, model: Path, workload: list[BatchCell], todo: list[tuple[int, BatchCell]]
) -> int:
    """Measure the turns; return how many were left out."""
    flags, cores = context.arguments, Cores.choose()
    most = max(cell.batch for cell in workload)
    setup = Setup(model, flags.kv_gib, most, cores.engine, context.run_dir.resolve(), flags.gguf)
    if flags.peer == "vllm":
        vllm_serve("cpu")
        settings: dict[str, Any] = {"engine_core": setup.engine_core, "context_tokens": MAX_CONTEXT_TOKENS}
        settings |= {"max_sequences": most, "kv_gib": flags.kv_gib, "model": plain_folder(model)}
        peer = partial(start_vllm, setup.run_dir, variant=VLLM_VARIANTS[flags.vllm], **settings)
    else:
        peer = partial(start_llamacpp, setup)
    with ExitStack() as running:
        context.say("starting both servers")
        duel = Duel(
            context, start_all([partial(start_kvasir, setup), peer], running), cores, vocabulary(model)
        )
        duel.prepare(max(workload, key=lambda cell: cell.batch * cell.context))
        return run_turns(duel, todo, budget_s=flags.budget_s)


def _gguf_file(text: str) -> Path:
    file = Path(text)
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(4) == b"GGUF":
            return file.resolve()
    raise ArgumentTypeError(f"{text} is no GGUF file")


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ArgumentTypeError("numbers separated by commas, as in 1,8,32") from error
    if min(numbers) < 1:
        raise ArgumentTypeError("numbers from 1")
    return numbers
