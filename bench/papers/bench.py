"""`python -m bench papers`: every main claim of the five papers, measured, with a verdict.

Each claim is measured in the paper's set-up as far as it can be had, and against today's peer. Pictures
have the axes of the paper's figures. A study writes its figures to a file as soon as they are there; a second
run with the same `--out` skips it while settings and code are the same.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import UTC, datetime

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.kit.provenance import ROOT, git_state, machine
from bench.papers import ecoserve, infinite_llm, mell, pie, prefix
from bench.papers.claims import TODAY, Effort, Finding, Study, Verdict, is_point, measured
from shared.errors import KvasirError

PAPERS: dict[str, tuple[Study, ...]] = {
    "mell": mell.STUDIES,
    "infinite-llm": infinite_llm.STUDIES,
    "prefix": prefix.STUDIES,
    "ecoserve": ecoserve.STUDIES,
    "pie": pie.STUDIES,
}
_COLUMNS = ("claim", "paper", "here", "today", "verdict")
_PAGE = """# The five papers

The claims of five papers, measured in their set-up as far as it can be had, and against today's peer. A page
for each, with what Kvasir changed: [EcoServe](papers/ecoserve.md), [MELL](papers/mell.md),
[Infinite-LLM](papers/infinite-llm.md), [prefix caching](papers/prefix-caching.md), [Pie](papers/pie.md).

Printed by `{command}`, {day}, commit {commit}, {cpu}, {cores} cores
([what the verdicts mean](benchmarks/papers.md)). *Holds with* names the change that turns a claim.

{tables}
## Set-ups

{set_ups}

[All figures](benchmarks.md) · [together](benchmarks/together.md) · [request lifecycle](request-lifecycle.md)
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--paper", choices=sorted(PAPERS), help="only this one")
    parser.set_defaults(out=ROOT / "runs" / "bench" / "papers")


def run(context: Context) -> Outcome:
    """Run the bench."""
    effort = Effort(context.quick, context.seed)
    only = context.arguments.paper
    studies = [study for paper, found in PAPERS.items() if only in (None, paper) for study in found]
    studies = [study for study in studies if study.has_quick or not effort.quick]
    findings: list[Finding] = []
    failed: list[str] = []
    with context.progress("studies", len(studies)) as bar:
        for study in studies:
            bar.advance(0, study.name)
            try:
                figures = measured(study, effort, context.run_dir)
            except KvasirError as error:
                failed.append(f"{study.name} was not measured: {str(error).splitlines()[0]}")
                continue
            findings += [Finding(study, claim, figures) for claim in study.claims if claim.figure in figures]
            for picture in study.pictures:
                picture.draw(context.picture(picture.name), figures)
            bar.advance()
    (context.run_dir / "papers.md").write_text(page(findings, context.quick))
    tables = [
        Table(paper, _COLUMNS, [_row(one) for one in findings if one.study.paper == paper])
        for paper in dict.fromkeys(study.paper for study in studies)
    ]
    return Outcome(_figures(findings), len(failed), tables, [*_notes(findings), *failed])


def _figures(findings: Sequence[Finding]) -> dict[str, float]:
    verdicts = [one.verdict for one in findings]
    return {
        "claims": len(findings),
        "reproduced": verdicts.count(Verdict.REPRODUCED),
        "reproduced_in_kind": verdicts.count(Verdict.IN_KIND),
        "far_beyond": sum(one.is_beyond for one in findings),
        "unexplained": sum(not one.is_explained for one in findings),
        **{name: value for one in findings for name, value in one.figures.items() if not is_point(name)},
    }


def _row(one: Finding) -> tuple[str, ...]:
    claim = one.claim
    today = one.figures.get(claim.figure + TODAY)
    rival = "" if today is None else f"{today:.3g} ({claim.today})"
    return (f"{claim.what} ({claim.source})", claim.said, f"{one.value:.3g}", rival, one.sentence)


def _notes(findings: Sequence[Finding]) -> list[str]:
    studies = dict.fromkeys(one.study for one in findings)
    return [f"{study.name}: {study.set_up}" for study in studies]


def page(findings: Sequence[Finding], quick: bool) -> str:
    """Return `docs/papers.md`."""
    lines = []
    for paper in dict.fromkeys(one.study.paper for one in findings):
        lines += [f"|{'|'.join((paper, *_COLUMNS[1:]))}|", "|---" * len(_COLUMNS) + "|"]
        mine = [one for one in findings if one.study.paper == paper]
        lines += [f"|{'|'.join(_row(one))}|" for one in mine]
        lines.append("")
    at = machine()
    return _PAGE.format(
        command=f"python -m bench papers{' --quick' if quick else ''}",
        day=datetime.now(UTC).date(),
        commit=(git_state()["commit"] or "unknown")[:8],
        cpu=at["cpu"],
        cores=at["cores"],
        tables="\n".join(lines),
        set_ups="\n".join(f"- {note}" for note in _notes(findings)),
    )
