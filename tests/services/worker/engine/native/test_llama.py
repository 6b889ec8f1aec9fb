"""The C++ Llama says what transformers' module says, in every shape, cut or whole, at once or in parts."""

import copy
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers

from services.worker.engine.attention import PagedAttention
from services.worker.engine.engine import TorchEngine
from services.worker.engine.forward import TransformersForward, make_forward
from services.worker.engine.loading import LoadedModel, describe
from services.worker.engine.native.families import obstacle
from services.worker.engine.native.library import load
from services.worker.engine.native.llama import LlamaLayer, LlamaModel, LlamaStep, NativeLlama
from services.worker.engine.paged import Shape
from services.worker.engine.partition import Homes, Part
from services.worker.engine.remote import Partial
from services.worker.engine.spans import Span
from shared.errors import InternalError

BLOCK_TOKENS = 4
VOCABULARY = 97
PROMPT = [(7 * place + 3) % VOCABULARY for place in range(41)]
ORIGINAL = {"factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "multi_head": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "heads_of_64": {"num_key_value_heads": 2, "head_dim": 64, "hidden_size": 80},
    "heads_of_128": {"num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 300},
    "odd": {"hidden_size": 44, "intermediate_size": 51, "head_dim": 22, "vocab_size": 131},
    "llama3": {"rope_parameters": LLAMA3 | ORIGINAL},
    "yarn": {"rope_parameters": YARN | ORIGINAL},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
}
BASE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}
BASE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
BASE |= {"max_position_embeddings": 256, "initializer_range": 0.15, "tie_word_embeddings": False}
BASE |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def make_module(shape: str) -> Any:
    torch.manual_seed(3)
    module: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE | SHAPES[shape]))
    return module.eval()


def paged(model: LoadedModel, blocks: int = 40) -> PagedAttention:
    sizes: dict[str, Any] = {"kv_blocks": blocks, "block_tokens": BLOCK_TOKENS}
    return PagedAttention(
        model.layers, **sizes, dtype=torch.float32, device=torch.device("cpu"), mode="native"
    )


class Llama:
    """A native Llama with pools of its own, driven span by span."""

    def __init__(self, module: Any, threads: int = 1, release: bool = False) -> None:
        model = describe(module)
        self.attention = paged(model)
        self.library = load()
        self.native = NativeLlama(module, self.attention, self.library, threads=threads, release=release)

    def logits(self, spans: list[Span], texts: list[list[int]]) -> torch.Tensor:
        tokens, positions, kept = self.inputs(spans, texts)
        return self.native(tokens, positions, kept).values.clone()

    def inputs(
        self, spans: list[Span], texts: list[list[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.attention.begin(spans, 0)
        pairs = list(zip(spans, texts, strict=True))
        tokens = [text[span.first_position + row] for span, text in pairs for row in range(span.count)]
        positions = [span.first_position + row for span in spans for row in range(span.count)]
        return torch.tensor(tokens), torch.tensor(positions), torch.arange(len(tokens))


@torch.no_grad()
def expected(module: Any, text: list[int]) -> torch.Tensor:
    module.set_attn_implementation("eager")
    logits: torch.Tensor = module(torch.tensor([text])).logits[0]
    return logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_those_of_transformers(shape: str, threads: int) -> None:
    module = make_module(shape)
    wanted = expected(module, PROMPT)
    found = Llama(module, threads).logits([Span(0, len(PROMPT), list(range(11)))], [PROMPT])
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", ["grouped", "odd"])
def test_cut_and_batched_it_says_the_same(shape: str) -> None:
    module = make_module(shape)
    other = PROMPT[::-1]
    llama = Llama(module)
    whole = llama.logits([Span(0, 41, list(range(11)))], [PROMPT])
    mine, theirs = [9, 2, 30, 31, 4, 5, 6, 39, 20, 21, 22], [10, 11, 12, 13, 14, 15]
    parts = []
    for first, end in ((0, 1), (1, 18), (18, 19), (19, 40), (40, 41)):
        count = min(end - first, 3)
        spans = [Span(first // 3, count, theirs), Span(first, end - first, mine)]
        parts.append(llama.logits(spans, [other, PROMPT])[count:])
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-5)
    assert torch.equal(torch.cat(parts).argmax(-1), whole.argmax(-1))


def test_the_call_for_all_is_its_parts_and_a_layer_waits_for_its_kv() -> None:
    llama = Llama(make_module("grouped"))
    spans, blocks = [Span(0, 9, [3, 1, 2])], [3, 1, 2]
    whole = llama.logits(spans, [PROMPT])
    then = llama.logits([Span(9, 1, blocks)], [PROMPT])
    pools = [(key.clone(), value.clone()) for key, value in llama.attention.pools]
    for key, value in llama.attention.pools:
        key.zero_()
        value.zero_()
    inputs = llama.inputs([Span(9, 1, blocks)], [PROMPT])
    step, model, library = llama.native.prepare(*inputs), llama.native.model, llama.library
    assert library.llama_embed(model, step) == 0
    for layer in range(2):
        assert library.llama_layer_qkv(model, layer, step) == 0
        for pool, saved in zip(llama.attention.pools[layer], pools[layer], strict=True):
            pool[blocks] = saved[blocks]  # The layer's KV arrives only now.
        assert library.llama_layer_attend(model, layer, step) == 0
        library.llama_layer_rest(model, layer, step)
    library.llama_logits(model, step)
    assert torch.equal(llama.native.logits(1).values, then)
    assert not torch.equal(then, whole[-1:])


class Beside:
    """A creditor in the same process: `RemoteAttention` over pools of its own."""

    def __init__(self, attention: PagedAttention) -> None:
        self.pools = [(torch.zeros_like(key), torch.zeros_like(value)) for key, value in attention.pools]
        self.backend = attention.partial_backend(self.pools)
        self.parts: Sequence[Part] = ()

    def begin(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape
    ) -> None:
        self.asked = queries.clone(), shape
        for part in self.parts:
            slots = torch.from_numpy(part.spans.slots)
            self.backend.write(layer, keys[part.rows], values[part.rows], slots)

    def collect(self, layer: int) -> Iterator[Partial]:
        queries, shape = self.asked
        for part in self.parts:
            found = self.backend.attend_part(layer, part.spans, queries[part.rows], shape)
            yield torch.from_numpy(part.rows), *found

    def end(self) -> None:
        self.parts = ()

    def abandon(self) -> None:
        self.parts = ()


def test_rows_whose_keys_are_all_own_are_computed_as_in_a_whole_step() -> None:
    """Bit by bit, beside a row that borrows; and that one's logits are what they are when it does not."""
    whole, divided = Llama(make_module("grouped")), Llama(make_module("grouped"))
    homes = Homes(40)
    homes.place([40, 41, 42, 43], 1, [7, 3, 20, 5])
    divided.attention.extend(homes, Beside(divided.attention))
    mine, theirs, borrowing = list(range(11)), list(range(11, 20)), [11, 40, 13, 41, 42, 16, 43, 18, 19]
    for first, count in ((0, 5), (5, 22), (27, 1), (28, 1)):
        texts, own = [PROMPT, PROMPT[::-1]], Span(first, count, mine)
        expected_rows = whole.logits([own, Span(first, count, theirs)], texts)
        found = divided.logits([own, Span(first, count, borrowing)], texts)
        assert divided.attention.is_partitioned and not whole.attention.is_partitioned
        divided.attention.end()
        assert torch.equal(found[:count], expected_rows[:count])
        torch.testing.assert_close(found[count:], expected_rows[count:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("token", [0, 5, 96])
def test_a_row_that_is_not_finite_says_so(poison: float, token: int) -> None:
    module = make_module("multi_head")
    module.model.embed_tokens.weight.data[token] = poison
    llama = Llama(module)
    inputs = llama.inputs([Span(0, 1, [0]), Span(0, 1, [1])], [[token], [(token + 1) % VOCABULARY]])
    found = llama.native(*inputs)
    assert found.highest is not None and not found.highest[0].isfinite() and found.highest[1].isfinite()


def test_what_is_packed_is_not_held_twice_and_only_on_demand() -> None:
    module = make_module("grouped")
    wanted, before = expected(module, PROMPT), copy.deepcopy(dict(module.named_parameters()))
    Llama(module)
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
    llama = Llama(module, release=True)
    held = sum(parameter.numel() for parameter in module.parameters())
    assert held == 5 * 64  # The norms.
    found = llama.logits([Span(0, len(PROMPT), list(range(11)))], [PROMPT])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("token", "position", "row", "code"),
    [(97, 0, 0, -101), (-1, 0, 0, -101), (3, 256, 0, -102), (3, 0, 1, -103)],
)
def test_what_does_not_exist_is_refused(token: int, position: int, row: int, code: int) -> None:
    llama = Llama(make_module("grouped"))
    llama.attention.begin([Span(0, 1, [0])], 1)
    with pytest.raises(InternalError, match=str(code)):
        llama.native(torch.tensor([token]), torch.tensor([position]), torch.tensor([row]))


def test_each_model_takes_the_fastest_pass_that_computes_it() -> None:
    module = make_module("grouped")
    model = describe(module)
    assert isinstance(make_forward(model, paged(model)), NativeLlama)
    plain = TorchEngine(model, kv_blocks=8, block_tokens=BLOCK_TOKENS, attention="torch")
    assert isinstance(plain._forward, TransformersForward)
    stretched = make_module("grouped")
    stretched.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert obstacle(stretched) == "rotations depend on the length"
    half = describe(make_module("grouped").to(torch.bfloat16))
    curved, biased = (describe(make_module("grouped")) for _ in range(2))
    curved.module.config.hidden_act = "gelu"
    biased.module.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.zeros(96))
    for other in (half, curved, biased):
        assert isinstance(make_forward(other, paged(model)), TransformersForward)


def test_structures_are_as_large_as_in_cpp() -> None:
    """Every pointer, number and padding counted, on any 64-bit machine."""
    sizes = [ctypes.sizeof(each) for each in (LlamaLayer, LlamaModel, LlamaStep)]
    matrix, pool = 8 + 3 * 4 + 4, 2 * 8 + 7 * 4 + 4
    layer, model = 9 * 8 + 7 * matrix + 2 * 8 + 8 + pool, 14 * 4 + 5 * 4 + 4 + 2 * matrix + 2 * 8
    assert sizes == [layer, model, 8 + 16 * 8 + 2 * 4 + 2 * 8]
