"""`python -m services.predictor train` and `evaluate`: train and test on a file, without a bus.

`train` writes the next version to a directory and reports its accuracy on the last rows, which it did not
train on. A predictor with that `state_dir` loads it at its next start. The background learner runs the same
command with `--only-if-better`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.predictor.core.length_model import LengthSample, ModelSettings
from services.predictor.core.report import LengthReport, evaluate, held_out_of
from services.predictor.models import create, model_names
from services.predictor.samples import load_tokenizer, read_samples
from shared.command_line import Parser
from shared.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from services.predictor.models.training import Verdict

_BACKGROUND_NICENESS = 10


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code: 0 success, 1 failure."""
    arguments = _parser().parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], None] = arguments.run
        run(arguments)
    except (ConfigError, InvalidRequest, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m services.predictor", description=__doc__)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="make the next version of the regressor (or of lm_head)")
    training.set_defaults(run=_train)
    training.add_argument("--out", type=Path, required=True, metavar="DIR", help="where versions are kept")
    training.add_argument("--model", choices=("regressor", "lm_head"), default="regressor")
    training.add_argument("--base-model", type=Path, metavar="DIR", help="lm_head: causal language model")
    training.add_argument("--held-out", type=int, metavar="N", help="rows at the end that judge [a tenth]")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--deadline-s", type=float, default=3600.0, help="stop training after this")
    training.add_argument("--only-if-better", action="store_true", help="write nothing otherwise")
    training.add_argument("--background", type=int, metavar="PID", help="low priority; end when PID does")
    testing = commands.add_parser("evaluate", help="how good a model is on a file")
    testing.set_defaults(run=_evaluate)
    testing.add_argument("--model", choices=model_names(), default="regressor")
    testing.add_argument("--state-dir", type=Path, metavar="DIR", help="where versions are kept")
    testing.add_argument("--base-model", type=Path, metavar="DIR", help="lm_head: causal language model")
    for command in (training, testing):
        command.add_argument("--data", type=Path, required=True, metavar="FILE", help="JSONL: prompt, length")
        command.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, to read text")
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _samples(arguments: argparse.Namespace) -> list[LengthSample]:
    return read_samples(arguments.data, arguments.tokenizer and load_tokenizer(arguments.tokenizer))


def _train(arguments: argparse.Namespace) -> None:
    should_stop = _patience(arguments)
    if should_stop():
        raise TimeoutError("training was stopped before it began")
    samples = _samples(arguments)
    held_out = held_out_of(len(samples)) if arguments.held_out is None else arguments.held_out
    if not 0 <= held_out < len(samples):
        raise InvalidRequest(f"--held-out {held_out} of {len(samples)} rows leaves none", param="held_out")
    if arguments.model == "lm_head":
        return _train_lm_head(arguments, samples, held_out, should_stop)
    import torch  # slow to import: after the checks

    from services.predictor.models.training import TrainingPlan, hold_trial

    torch.set_num_threads(1)

    def progress(done: int, total: int, mae: float) -> None:
        print(f"epoch {done} of {total}: MAE {mae:.1f} tokens on a fold", file=sys.stderr, flush=True)

    verdict = hold_trial(
        samples,
        arguments.out,
        TrainingPlan(seed=arguments.seed),
        held_out=held_out,
        only_if_better=arguments.only_if_better,
        should_stop=should_stop,
        progress=progress,
    )
    _print_verdict(verdict, as_json=arguments.json)


def _train_lm_head(
    arguments: argparse.Namespace, samples: list[LengthSample], held_out: int, should_stop: Callable[[], bool]
) -> None:
    try:
        from services.predictor.models.lm_head import LmHeadModel, train_lm_head
    except ImportError as error:
        raise ConfigError(
            f"lm_head needs a package ({error}); this installs it: "
            ".venv/bin/pip install --require-hashes -r deploy/locks/lm-head.txt"
        ) from error
    if arguments.base_model is None:
        raise ConfigError("lm_head is made from a language model; give --base-model DIR", param="base_model")
    learned, latest = samples[: len(samples) - held_out], samples[len(samples) - held_out :]
    train_lm_head(learned, arguments.base_model, arguments.out, seed=arguments.seed, should_stop=should_stop)
    model = LmHeadModel.from_settings(ModelSettings(state_dir=arguments.out, base_model=arguments.base_model))
    _print_report(evaluate(model, latest), model.version, as_json=arguments.json)


def _patience(arguments: argparse.Namespace) -> Callable[[], bool]:
    """Return a check that is true after the deadline, or once the parent of a background run has exited."""
    end_s = time.monotonic() + arguments.deadline_s
    if arguments.background is not None:
        os.nice(_BACKGROUND_NICENESS)
    return lambda: (
        time.monotonic() > end_s
        or (arguments.background is not None and os.getppid() != arguments.background)
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    settings = ModelSettings(
        state_dir=arguments.state_dir, tokenizer=arguments.tokenizer, base_model=arguments.base_model
    )
    model = create(arguments.model, settings)
    _print_report(evaluate(model, _samples(arguments)), model.version, as_json=arguments.json)


def _print_verdict(verdict: "Verdict", *, as_json: bool) -> None:
    old, new = (None if report is None else report.as_dict() for report in (verdict.old, verdict.new))
    if as_json:
        written = None if verdict.path is None else verdict.path.name
        print(json.dumps({"written": written, "old_version": verdict.old_version, "old": old, "new": new}))
        return
    print(f"{'':18}{verdict.old_version:>16}{'new':>12}")
    for name, value in (new or {}).items():
        print(f"{name:18}{(old or {}).get(name, '-'):>16}{value:>12}")
    print("not better: nothing written" if verdict.path is None else f"written: {verdict.path}")


def _print_report(report: LengthReport | None, version: str, *, as_json: bool) -> None:
    figures = {} if report is None else report.as_dict()
    if as_json:
        print(json.dumps({"version": version, **figures}))
        return
    print(version)
    for name, value in figures.items():
        print(f"{name:18}{value:>12}")
