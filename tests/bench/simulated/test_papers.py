"""Claims of the five papers on little: one study each holds in kind, verdicts, and a run that goes on."""

import json
from pathlib import Path

import pytest

from bench.cli import main
from bench.kit.plots import Chart
from bench.papers import bench, claims, ecoserve, pie
from bench.papers.claims import Claim, Effort, Finding, Picture, Rule, Study, Verdict, judge, points
from bench.simulated.ecoserve.measures import measure_reference

QUICK = Effort(quick=True)


EXPECTED = {
    "mell-packing": {"gpus_vs_bf", "gpus_vs_wf", "gpus_vs_lb", "use", "use_vs_wf", "bound"},
    "infinite-llm-contexts": {"context_2"},
    "prefix-templates": {"text", "miss_host", "miss_disk", "orders"},
    "ecoserve-alpaca": {"rate_orca_alpaca", "failures_alpaca"},
    "pie-flexgen": {"flexgen_sharegpt", "flexgen_cut"},
}


SLOW = {"ecoserve-alpaca": [pytest.mark.slow]}


@pytest.mark.parametrize("study", [pytest.param(name, marks=SLOW.get(name, ())) for name in EXPECTED])
def test_a_paper_holds_in_kind(study: str) -> None:
    (one,) = (found for studies in bench.PAPERS.values() for found in studies if found.name == study)
    figures = one.measure(QUICK)
    findings = [Finding(one, claim, figures) for claim in one.claims if claim.figure in figures]
    held = {finding.claim.figure for finding in findings if finding.verdict is not Verdict.NOT}
    assert held >= EXPECTED[study], [(finding.claim.figure, finding.sentence) for finding in findings]


def test_ecoserve_holds_in_kind_at_the_arrivals_of_its_table_2() -> None:
    cases = {side: ecoserve._case(side, "sharegpt", 100, QUICK) for side in ("vllm", "orca", "ecoserve")}
    rows = ecoserve._rows(cases, 28.0, measure_reference(cases["vllm"]), (0,))
    ours, orca = rows["ecoserve"], rows["orca"]
    assert ours["slo"] > 1.4 * orca["slo"] and ours["tokens_per_s"] > 1.5 * orca["tokens_per_s"]
    assert ours["alloc_failures"] <= 0.05 < rows["vllm"]["alloc_failures"]


@pytest.mark.parametrize(
    ("rule", "span", "value", "verdict"),
    [
        (Rule.RATIO, (1.28, 2.33), 1.3, Verdict.REPRODUCED),
        (Rule.RATIO, (1.28, 2.33), 1.2, Verdict.IN_KIND),
        (Rule.RATIO, (1.28, 2.33), 9.0, Verdict.IN_KIND),
        (Rule.RATIO, (1.28, 2.33), 0.76, Verdict.NOT),
        (Rule.RATIO, (0.91, 0.69), 0.85, Verdict.REPRODUCED),
        (Rule.RATIO, (0.91, 0.69), 1.02, Verdict.NOT),
        (Rule.LEAST, (0.88, 0.88), 0.85, Verdict.REPRODUCED),
        (Rule.LEAST, (0.88, 0.88), 0.7, Verdict.NOT),
        (Rule.MOST, (10, 10), 11.2, Verdict.IN_KIND),
        (Rule.MOST, (0, 0), 0.1, Verdict.NOT),
    ],
)
def test_verdicts(rule: Rule, span: tuple[float, float], value: float, verdict: Verdict) -> None:
    assert judge(Claim("x", "x", "§1", span, rule), value) is verdict


@pytest.mark.parametrize(("value", "is_beyond"), [(2.0, False), (5.0, False), (6.0, True), (0.5, False)])
def test_an_effect_of_more_than_twice_the_papers_is_said(value: float, is_beyond: bool) -> None:
    claim = Claim("x", "x", "§1", (1.28, 2.33))
    found = Finding(bench.PAPERS["pie"][0], claim, {"x": value})
    assert found.is_beyond is is_beyond and ("far beyond" in found.sentence) is is_beyond


def test_a_change_of_the_set_up_explains_a_claim() -> None:
    claim = Claim("rate", "x", "§4", (2.0, 3.0), turns=(("more memory", "roomy"), ("true lengths", "known")))
    study = Study("a", "a", "", lambda _: {}, (claim,))
    found = Finding(study, claim, {"rate": 0.9, "roomy": 1.1, "known": 1.7})
    assert found.sentence == "not reproduced; holds with true lengths: 1.7" and found.is_explained
    found = Finding(study, claim, {"rate": 0.9, "roomy": 1.1, "known": 1.0})
    assert not found.is_explained and "not turned by more memory: 1.1, true lengths: 1" in found.sentence


def test_a_picture_shows_the_points_of_its_name_beside_the_papers(tmp_path: Path) -> None:
    figures = {
        **points("fig1", {"ours": {1: 1.0, 2: 1.9}}),
        **points("fig10", {"x": {"a": 1.0}}),
        "gain": 1.9,
    }
    drawn: list[Chart] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(claims, "draw_lines", lambda _, chart: drawn.append(chart))
        Picture("fig1", "Fig. 1", "instances", "context", said=(("2", 2.0),)).draw(tmp_path / "x", figures)
    assert drawn[0].curves == {"ours": [(1.0, 1.0), (2.0, 1.9)], "the paper": [(2.0, 2.0)]}
    Picture("fig10", "Fig. 10", "", "GB").draw(tmp_path / "bars.png", figures)
    Picture("fig2", "Fig. 2", "", "GB").draw(tmp_path / "none.png", figures)
    assert (tmp_path / "bars.png").stat().st_size > 1000 and not (tmp_path / "none.png").exists()


def test_a_second_run_reads_what_the_first_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, figure4 = pie.STUDIES
    monkeypatch.setattr(bench, "PAPERS", {"pie": (figure4,)})
    words = f"papers --quick --paper pie --out {tmp_path} --json {tmp_path / 'r.json'}".split()
    assert main(words) == 0
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert figures["claims"] == figures["reproduced"] == 2 and figures["unexplained"] == 0
    file = tmp_path / "pie-figure4-quick.json"
    file.write_text(file.read_text().replace('"fig4_stalls": 0.0', '"fig4_stalls": 7.0'))
    assert main(words) == 0
    assert json.loads((tmp_path / "r.json").read_text())["figures"]["fig4_stalls"] == 7.0
    page = (tmp_path / "papers.md").read_text()
    assert "stalls with seven slots (fig. 4)|≤0|7|" in page and "python -m bench papers --quick`, 20" in page
    assert main([*words, "--seed", "1"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["figures"]["fig4_stalls"] == 0.0
