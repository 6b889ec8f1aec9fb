"""Replayed decodes are the decodes, and the device's Llama says what transformers' modules say."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")

from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.decoder import CudaDecoder, with_graphs
from services.worker.engine.gpu.graphs import (
    Capture,
    Compute,
    CudaCapture,
    DecodeArrays,
    DecodeGraphs,
    GraphLimits,
    GraphReplay,
    Results,
    batch_sizes,
)
from services.worker.engine.gpu.spans import MOST_TILE_KEYS
from services.worker.engine.paged import Shape
from services.worker.engine.spans import Span, pack

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, BLOCK_TOKENS, BLOCKS = 11, 32, 4, 2, 16, 4, 24
LIMITS = GraphLimits(max_batch=6, max_blocks=4)


def capture_for(device: torch.device) -> Capture:
    """The real one where there is a device."""
    return CudaCapture() if device.type == "cuda" else recording


def recording(compute: Compute) -> GraphReplay:
    """The same computation on the same tensors into the same results, whenever it is replayed."""
    logits, hidden = (each.clone() for each in compute())

    def replay() -> Results:
        new_logits, new_hidden = compute()
        return logits.copy_(new_logits), hidden.copy_(new_hidden)

    return replay


def backend_for(device: torch.device) -> TritonBackend:
    k_pool = torch.zeros(BLOCKS, KV_HEADS, DIM, BLOCK_TOKENS, device=device)
    v_pool = torch.zeros(BLOCKS, KV_HEADS, BLOCK_TOKENS, DIM, device=device)
    return TritonBackend([(k_pool, v_pool)], BLOCK_TOKENS, device)


class SmallModel:
    """A `Computation` with one layer: embedding with position, paged attention, head."""

    def __init__(self, backend: TritonBackend) -> None:
        generator = torch.Generator().manual_seed(3)
        self._backend = backend
        self.calls = 0
        sizes = (VOCABULARY, WIDTH), (64, WIDTH), ((HEADS + 2 * KV_HEADS) * DIM, WIDTH), (VOCABULARY, 64)
        self._embedding, self._places, self._projection, self._head = (
            torch.randn(*size, generator=generator).to(backend.device) for size in sizes
        )

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        tokens, positions, kept = (each.to(self._embedding.device) for each in (tokens, positions, kept))
        hidden = self._embedding[tokens] + self._places[positions]
        joined = (hidden @ self._projection.T).view(hidden.shape[0], -1, DIM)
        queries, keys, values = torch.split(joined, [HEADS, KV_HEADS, KV_HEADS], 1)
        self._backend.write(0, keys, values, self._backend.step.slots)
        attended = self._backend.attend(0, queries, keys, values, Shape(0.25), None)
        found = attended[kept].flatten(1)
        return found @ self._head.T, found


class Engine:
    """A model in a graph and one without, on the same device; `step` runs both."""

    def __init__(self, device: torch.device) -> None:
        self.backends = [backend_for(device) for _ in range(2)]
        self.models = [SmallModel(backend) for backend in self.backends]
        self.graphs = DecodeGraphs(self.models[0], self.backends[0], LIMITS, capture_for(device))
        self.device = device

    def step(self, spans: list[Span], kept: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits replayed (where they are) and plain."""
        rows = [(index, at) for index, span in enumerate(spans) for at in range(span.count)]
        tokens = torch.tensor([(7 * index + 3 * at) % VOCABULARY for index, at in rows])
        positions = torch.tensor([spans[index].first_position + at for index, at in rows])
        wanted = torch.tensor(list(range(len(rows))) if kept is None else kept)
        with torch.inference_mode():
            for backend in self.backends:
                backend.begin(spans, 0, pack(spans, BLOCK_TOKENS))
            found = self.graphs(tokens, positions, wanted)
            logits, hidden = self.models[1](tokens, positions, wanted)
        assert found.hidden is not None
        torch.testing.assert_close(found.hidden, hidden, rtol=1e-4, atol=1e-4)
        return found.values, logits

    def check_pools(self) -> None:
        for mine, theirs in zip(*(backend.pools[0] for backend in self.backends), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def spans_of(lengths: list[int], extra: int = 1) -> list[Span]:
    return [Span(length, extra, list(range(4 * row, 4 * row + 4))) for row, length in enumerate(lengths)]


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 14), min_size=1, max_size=6), min_size=1, max_size=3))
def test_replayed_decodes_are_the_decodes(device: torch.device, steps: list[list[int]]) -> None:
    engine = Engine(device)
    engine.step(spans_of([0] * 6, extra=15))
    engine.graphs.capture_all()
    for lengths in steps:
        replayed, plain = engine.step(spans_of(lengths))
        assert replayed.shape == plain.shape
        torch.testing.assert_close(replayed, plain, rtol=1e-4, atol=1e-4)
        engine.check_pools()


def test_capturing_and_padding_write_nothing(device: torch.device) -> None:
    engine = Engine(device)
    engine.graphs.capture_all()
    assert not any(pool.any() for pool in engine.backends[0].pools[0])
    replayed, plain = engine.step(spans_of([0, 0, 0]), kept=[0, 2])
    torch.testing.assert_close(replayed, plain, rtol=1e-4, atol=1e-4)
    engine.check_pools()


def test_no_number_of_an_earlier_step_is_left_where_block_ids_are_read(device: torch.device) -> None:
    """A tile is read whole, beyond the end of a table: lengths of a larger batch there would be taken for
    blocks, of which there are not as many."""
    arrays = DecodeArrays(GraphLimits(max_batch=6, max_blocks=40), device)
    for lengths in ([150] * 6, [3], [150] * 4, [3, 5]):
        step = [Span(length, 1, [row] * (length // BLOCK_TOKENS + 1)) for row, length in enumerate(lengths)]
        packed = pack(step, BLOCK_TOKENS)
        arrays.fill(packed, len(lengths))
        read = arrays.changing(len(lengths))[3][: len(packed.blocks) + MOST_TILE_KEYS]
        assert len(read) == len(packed.blocks) + MOST_TILE_KEYS and int(read.max()) < BLOCKS


def test_what_was_not_captured_runs_as_it_is(device: torch.device) -> None:
    engine = Engine(device)
    chunk, batch, tall = spans_of([0, 0], extra=3), spans_of([3] * 6), [Span(0, 1, [0] * 25)]
    before = engine.models[0].calls
    engine.step(batch)
    assert engine.models[0].calls == before + 1  # Nothing is captured yet.
    engine.graphs.capture_all()
    too_many = [*spans_of([3] * 6)[:5], Span(0, 1, [20]), Span(0, 1, [21])]
    for spans in (chunk, tall, too_many):
        before = engine.models[0].calls
        replayed, plain = engine.step(spans)
        assert engine.models[0].calls == before + 1
        torch.testing.assert_close(replayed, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_replay_calls_no_forward() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    engine = Engine(torch.device("cuda"))
    engine.graphs.capture_all()
    before = engine.models[0].calls
    engine.step(spans_of([2, 3]))
    assert engine.models[0].calls == before


@pytest.mark.parametrize(
    ("max_batch", "sizes"),
    [(1, [1]), (6, [1, 2, 4, 6]), (20, [1, 2, 4, 8, 16, 20]), (200, [1, 2, 4, *range(8, 65, 8), 128, 200])],
)
def test_sizes_reach_up_to_the_largest_batch(max_batch: int, sizes: list[int]) -> None:
    assert batch_sizes(max_batch) == sizes


WORDS, POSITIONS, BLOCK_TOKENS, LLAMA_BLOCKS = 40, 64, 4, 16
TRAINED = Path(__file__).parents[5] / "models" / "tiny_chat"


def make_module(device: torch.device, **settings: Any) -> Any:
    torch.manual_seed(4)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 40, "head_dim": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=POSITIONS, **settings)
    module: Any = transformers.LlamaForCausalLM(config)
    return module.eval().requires_grad_(False).to(device)


def llama_backend(module: Any, block_tokens: int = BLOCK_TOKENS) -> TritonBackend:
    config, head_dim = module.config, module.model.layers[0].self_attn.head_dim
    size, device = (LLAMA_BLOCKS, config.num_key_value_heads), module.lm_head.weight.device
    pools = [
        (
            torch.zeros(*size, head_dim, block_tokens, device=device),
            torch.zeros(*size, block_tokens, head_dim, device=device),
        )
        for _ in range(config.num_hidden_layers)
    ]
    return TritonBackend(pools, block_tokens, device)


def begin(backend: TritonBackend, spans: list[Span]) -> None:
    backend.begin(spans, 0, pack(spans, backend.block_tokens))


@pytest.mark.gpu
def test_captured_decodes_say_what_transformers_says() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    device = torch.device("cuda")
    module = make_module(device)
    tokens = torch.randint(WORDS, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = module(input_ids=tokens.to(device)).logits[0]
    backend = llama_backend(module)
    forward = with_graphs(module, backend, POSITIONS)
    with torch.inference_mode():
        for place in range(30):
            begin(backend, [Span(place, 1, list(range(8)))])
            at, kept = torch.tensor([place]), torch.zeros(1, dtype=torch.int64)
            logits = forward(tokens[0, at], at, kept).values
            torch.testing.assert_close(logits[0], expected[place], rtol=1e-3, atol=1e-3)


def test_a_trained_model_writes_what_transformers_would(device: torch.device) -> None:
    """Prompts and decodes in one batch, the decodes replayed: every token the likeliest, or a near tie."""
    factory: Any = transformers.LlamaForCausalLM
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(TRAINED)
    original = factory.from_pretrained(TRAINED, dtype=torch.float32).eval().requires_grad_(False)
    module = copy.deepcopy(original).to(device)
    backend = llama_backend(module, block_tokens=16)
    llama = CudaDecoder(module, backend, max_positions=128)
    forward = DecodeGraphs(llama, backend, GraphLimits(max_batch=2, max_blocks=8), capture_for(device))
    forward.capture_all()
    prompts = [tokenizer(prompt).input_ids for prompt in ("What is rain?", "Hello!")]
    sequences, done = [list(prompt) for prompt in prompts], [0, 0]
    for _ in range(60 if device.type == "cuda" else 4):
        rows = [(row, at) for row, own in enumerate(sequences) for at in range(done[row], len(own))]
        counts = [len(own) - at for own, at in zip(sequences, done, strict=True)]
        begin(backend, [Span(done[row], counts[row], list(range(8 * row, 8 * row + 8))) for row in (0, 1)])
        tokens = torch.tensor([sequences[row][at] for row, at in rows])
        positions = torch.tensor([at for _, at in rows])
        ends = torch.tensor([counts[0] - 1, sum(counts) - 1])
        with torch.inference_mode():
            chosen = forward(tokens, positions, ends).values.argmax(-1).tolist()
        done = [len(own) for own in sequences]
        sequences = [[*own, token] for own, token in zip(sequences, chosen, strict=True)]
    for prompt, own in zip(prompts, sequences, strict=True):
        with torch.inference_mode():
            logits = original(input_ids=torch.tensor([own])).logits[0, len(prompt) - 1 : -1]
        written = logits.gather(1, torch.tensor(own[len(prompt) :])[:, None]).squeeze(1)
        assert (logits.amax(-1) - written).max() <= 1e-3
