"""The benches of single parts, on little."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.micro import pie_gpu, predictor, scheduler
from bench.micro.bulk import bench as bulk
from bench.micro.distattention.attention import LayerTimes, measure_cells, measure_error
from bench.micro.distattention.bench import _figures, draw
from bench.micro.engine_host import thread_us_per_row
from bench.micro.gpu import attention, steps
from bench.micro.gpu import bench as gpu
from bench.micro.gpu.steps import Shape
from bench.micro.lanes import RUNNING, BusyFleet
from bench.micro.step import decode_rows, run, split_ms
from services.predictor.core.length_model import LengthSample
from services.predictor.samples import write_samples
from services.scheduler.core.effects import Effect
from services.scheduler.core.worker_pipeline import WorkerPipeline
from services.worker.engine.loading import load
from services.worker.peers.attention.core.cost import ShipMode
from shared.errors import ConfigError
from shared.messages.sequence import Sampling, pack_tokens
from sim.traces import read_trace
from sim.workloads import Source, has_predictions
from tests.bench.rig import context_of
from tests.stack.running import TINY_CHAT
from tests.triton_here import skip_unless_interpreted


def test_measures_every_side_and_compares_tcp_with_a_bare_socket(tmp_path: Path) -> None:
    outcome = bulk.run(context_of("bulk", tmp_path, "--mib", "1", "2", "--rounds", "2"))
    figures = outcome.figures
    for name in ("memcpy", "bare", "tcp", "shm"):
        assert figures[f"{name}_gb_s"] == figures[f"{name}_gb_s_2mib"] > 0
    assert 0 < figures["tcp_vs_limit"] < 20
    for name in ("tcp", "shm"):
        assert 0 < figures[f"{name}_round_trip_us_p50"] <= figures[f"{name}_round_trip_us_p99"]
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) >= 4 * 2 * 2


def test_refuses_sizes_beyond_what_the_peer_holds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        bulk.run(context_of("bulk", tmp_path, "--mib", "512"))


CORE = max(os.sched_getaffinity(0))


def test_random_partitions_are_exact() -> None:
    torch.set_num_threads(1)
    assert 0 < measure_error(CORE, 2, creditors=2) < 1e-5


def test_every_side_of_a_cell_is_measured() -> None:
    torch.set_num_threads(1)
    done: list[int] = []
    cells = measure_cells(CORE, [64, 128], [1, 1 << 20], 2, lambda: done.append(1))
    assert [(c.rows, c.context_tokens) for c in cells] == [(1, 64), (1, 128)], "the others are too large"
    assert len(done) == 2 and all(min(cell.whole_s, cell.ship_s, cell.fetch_s) > 0 for cell in cells)


def cell(rows: int, tokens: int, ship_s: float, fetch_s: float, chosen: ShipMode) -> LayerTimes:
    return LayerTimes(rows, tokens, 0.001, ship_s, fetch_s, ship_s / 0.001 - 1, 0.6, fetch_s / ship_s, chosen)


def test_figures_are_the_longest_decodes(tmp_path: Path) -> None:
    cells = [
        cell(1, 1024, 0.0015, 0.003, ShipMode.SHIP),
        cell(64, 1024, 0.004, 0.003, ShipMode.SHIP),
        cell(1, 4096, 0.0011, 0.0088, ShipMode.SHIP),
    ]
    figures = _figures(cells)
    assert abs(figures["remote_overhead"] - 0.1) < 1e-9 and abs(figures["remote_overhead_c1024"] - 0.5) < 1e-9
    assert abs(figures["query_vs_fetch_speedup"] - 8) < 1e-9 and abs(figures["choice_regret"] - 1 / 3) < 1e-9
    draw(tmp_path / "figure.png", cells)
    assert (tmp_path / "figure.png").stat().st_size > 1000


CPU = torch.device("cpu")
SMALL = Shape(layers=2, hidden=32, intermediate=48, q_heads=4, kv_heads=2, vocabulary=50, head_dim=16)


def test_without_a_device_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match="no CUDA device"):
        gpu.run(context_of("gpu", tmp_path, quick=False))


def test_a_step_reads_every_weight_but_the_embedding_and_all_keys() -> None:
    module = steps.random_llama(SMALL, 64, torch.bfloat16, CPU)
    assert next(module.parameters()).dtype is torch.bfloat16
    attention = (4 + 2 + 2) * 16 * 32 + 4 * 16 * 32
    weights = 2 * (attention + 3 * 32 * 48 + 2 * 32) + 32 + 50 * 32
    assert steps.step_bytes(module, SMALL, 3, 20) == 2 * weights + 2 * SMALL.kv_bytes(3, 20)


def test_all_sides_compute_the_same() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")
    if torch.cuda.is_available():
        pytest.skip("the bench itself compares them on the device")
    skip_unless_interpreted()
    tables = torch.randperm(6).view(2, 3)
    keys = attention.make_keys(SMALL, tables, torch.float32, CPU, seed=1)
    ours = attention.our_attention(SMALL, tables, multiprocessors=4)(keys)
    torch.testing.assert_close(ours, attention.sdpa_attention(keys), rtol=1e-5, atol=1e-5)


SIX_LAYERS = Shape(layers=6, hidden=64, intermediate=96, q_heads=4, kv_heads=2, vocabulary=50, head_dim=16)


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match="no CUDA device"):
        pie_gpu.run(context_of("pie-gpu", tmp_path, quick=False))


def test_copies_run_beside_the_computation() -> None:
    compute = pie_gpu.layer_of(SIX_LAYERS, 4, CPU, torch.float32)
    plain, swapped = (
        pie_gpu.measure(SIX_LAYERS, level, blocks, 24, compute, CPU, 8, torch.float32)
        for level, blocks in ((0, 24), (4, 16))
    )
    assert plain.step_s > 0 and plain.bytes_per_s == 0 and plain.stall_share == 0
    assert swapped.step_s > 0 and swapped.bytes_per_s > 0 and swapped.stall_share >= 0


@pytest.mark.gpu
def test_on_a_device_the_overlap_is_measured() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    compute = pie_gpu.layer_of(SIX_LAYERS, 4, device)
    assert pie_gpu.measure(SIX_LAYERS, 4, 16, 24, compute, device, 8).bytes_per_s > 0


def test_a_file_of_ones_own_is_measured(tmp_path: Path) -> None:
    samples = predictor.templates(random.Random(0), 600, 0).train
    write_samples(tmp_path / "mine.jsonl", samples)
    outcome = predictor.run(context_of("predictor", tmp_path, "--trace", str(tmp_path / "mine.jsonl")))
    figures = outcome.figures
    assert figures["mae_vs_histogram"] == pytest.approx(figures["mae"] / figures["histogram_mae"])
    assert figures["mae_vs_histogram"] < 0.9, "the request says how long the answer is"
    assert 0 <= figures["within_50"] <= figures["within_100"] <= 1 and figures["predict_ms_p50_b32"] > 0
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 300
    errors = [abs(row["length"] - row["p50"]) for row in rows]
    assert np.mean(errors) == pytest.approx(figures["mae"])
    trace = read_trace(tmp_path / "mine.csv")
    assert [row.output_tokens for row in trace] == [row["length"] for row in rows]
    assert has_predictions(Source(path=tmp_path / "mine.csv")), "the simulator can tell what it said"


def test_the_histogram_is_the_median_of_each_bucket() -> None:
    train = [
        LengthSample(pack_tokens([1] * size), length, censored=False)
        for size, length in [(10, 4), (10, 5), (10, 9), (90, 100), (90, 300), (90, 200)]
    ]
    test = [
        LengthSample(pack_tokens([2] * 10), 6, censored=False),
        LengthSample(pack_tokens([2] * 90), 190, censored=False),
        LengthSample(pack_tokens([2] * 90), 1, censored=True),
    ]
    assert predictor.histogram_mae(train, test) == pytest.approx((1 + 10) / 2)


def test_figures_have_the_agreed_names(tmp_path: Path) -> None:
    words = "--policies kvasir,vllm --queued 5 50 --calls 20 --replays 1 --lanes 3".split()
    outcome = scheduler.run(context_of("scheduler", tmp_path, *words, seed=7))
    names = {"plan_ms_p50_q5", "plan_ms_p99_q5", "plan_ms_p50_q50", "plan_ms_p99_q50", "growth"}
    events = {"event_ms_p50_lanes3", "event_ms_p99_lanes3"}
    assert set(outcome.figures) == names | events | {f"vllm_{name}" for name in names}
    assert all(outcome.figures[name] > 0 for name in names - {"growth"}) and len(outcome.tables[0].rows) == 4


def test_one_event_visits_only_workers_to_which_something_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = BusyFleet("vllm", 40, 1)
    assert fleet._core.running == 40 * RUNNING and fleet._core.queued == 0
    planned: list[str] = []
    plain = WorkerPipeline.next_plans

    def counted(self: WorkerPipeline, now_s: float) -> list[Effect]:
        planned.append(self.worker_id)
        return plain(self, now_s)

    monkeypatch.setattr(WorkerPipeline, "next_plans", counted)
    for on_event, most in ((fleet.turn, 8), (fleet.heartbeat, 1), (fleet.tick, 16)):
        for _ in range(20):
            planned.clear()
            on_event()
            assert len(set(planned)) <= most


def test_rows_are_single_tokens_in_blocks_of_their_own() -> None:
    rows = decode_rows(3, 20, Sampling(seed=0, max_tokens=1))
    assert [len(row.tokens) for row in rows] == [1, 1, 1]
    assert [list(row.blocks) for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert {row.first_position for row in rows} == {20}


def test_a_step_is_longer_than_its_forward_pass(tmp_path: Path) -> None:
    outcome = run(context_of("step", tmp_path, "--batches", "1", "3", "--contexts", "20"))
    for batch in (1, 3):
        forward_ms = outcome.figures[f"forward_ms_b{batch}_c20"]
        assert 0 < forward_ms < outcome.figures[f"step_ms_b{batch}_c20"]
    assert [list(row)[:2] for row in outcome.tables[0].rows] == [[1, 20], [3, 20]]
    assert not outcome.tables[1].rows, "batches of 64 are beyond these"
    assert all(outcome.figures[f"split_ms_{batch}"] > 0 for batch in (64, 256))


def test_a_step_around_the_model_takes_longer_for_more_sequences() -> None:
    """Sequences cross the borders of blocks meanwhile, and every row has its token."""
    torch.set_num_threads(1)
    model = load(str(TINY_CHAT), dtype="float32", device="cpu")
    few, many = (batch * thread_us_per_row(model, batch, context_tokens=40, plans=6) for batch in (2, 64))
    assert 0 < few < many
    assert thread_us_per_row(model, 2, chunk_tokens=512, plans=3) > few / 2, "a chunk is more work"


def test_a_step_is_cut_for_any_number_of_borrowers() -> None:
    assert all(split_ms(4, 40, 16, borrowers, 2, 2) > 0 for borrowers in (0, 1, 4))
