"""A gateway as it runs, on a real port and a real bus, with a fake scheduler and two fake workers behind
it."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from services.gateway.config import GatewayConfig
from services.gateway.service import run
from services.gateway.text.tokenizer import Codec, load_codec
from services.stack.obstructions import free_port
from shared.bus import Bus
from shared.config import BusConfig
from shared.messages.sequence import SequenceSpec
from tests.services.gateway.fakes import MODEL, FakeScheduler, FakeWorker, cancelled

KEY = "sk-test-key"
ANSWER = "The quick brown fox says häß, 日本語 and 😀 to the lazy dog. END of the answer, truly."
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] not in ['system', 'user', 'assistant'] %}\n"
    "        {{ raise_exception('no such role') }}\n"
    "    {% endif %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_model_folder(folder: Path) -> Path:
    """A byte-level BPE tokenizer with a chat template, as Hugging Face lays it out; no weights."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([ANSWER, "hello world, how are you?"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"content": "<|end|>", "__type": "AddedToken"},
        "pad_token": "<|pad|>",
        "additional_special_tokens": SPECIALS[3:],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 64}
    model = {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 2, **sizes}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> Codec:
    return load_codec(str(model_folder))


def encode_chat(codec: Codec, messages: Sequence[dict[str, str]]) -> list[int]:
    """The ids of a chat up to the answer."""
    return codec.encode_text(codec.chat_template.render(messages), add_special_tokens=False)


@dataclass
class Stack:
    """Everything a test of the gateway wants to reach."""

    url: str
    port: int
    scheduler: FakeScheduler
    workers: list[FakeWorker]
    http: httpx.AsyncClient
    operator: httpx.AsyncClient
    """Of the operator's listener, without a key."""
    openai: openai.AsyncOpenAI
    codec: Codec
    running: asyncio.Task[None]

    @property
    def body(self) -> dict[str, object]:
        """A small, deterministic chat request."""
        return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}

    def pace(self, step_s: float) -> None:
        """Workers take so long for each token."""
        for worker in self.workers:
            worker.step_s = step_s

    def hold(self, *, is_held: bool = True) -> None:
        """Workers compute no more, or again."""
        for worker in self.workers:
            (worker.computing.clear if is_held else worker.computing.set)()

    async def chat(self, **fields: object) -> httpx.Response:
        """That request with `fields` on top."""
        return await self.http.post("/v1/chat/completions", json={**self.body, **fields})


MakeStack = Callable[..., Awaitable[Stack]]


def tokens_of(codec: Codec) -> Callable[[SequenceSpec], list[int]]:
    """`ANSWER`, rotated by the choice and, above temperature 0, by the seed; then the end token."""
    ids = codec.tokenizer.encode(ANSWER, add_special_tokens=False).ids

    def true_tokens(spec: SequenceSpec) -> list[int]:
        sampling = spec.sampling
        by = (sampling.seed % 7 if sampling.temperature else 0) + spec.ref.choice
        tokens = [*ids[by:], *ids[:by], 2]
        return tokens if sampling.end_token_ids else tokens * 40

    return true_tokens


@pytest_asyncio.fixture
async def make_stack(
    bus_config: BusConfig, connect_bus: Callable[..., Awaitable[Bus]], model_folder: Path, codec: Codec
) -> AsyncIterator[MakeStack]:
    """Starts a gateway with settings of the test's choosing, waits until it is ready, and ends it
    afterwards."""
    loops: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as ends:

        async def make(*, wait_ready: bool = True, **settings: object) -> Stack:
            true_tokens = tokens_of(codec)
            buses = [await connect_bus("worker", f"worker-{at}") for at in range(2)]
            workers = [FakeWorker(bus, true_tokens) for bus in buses]
            scheduler = FakeScheduler(await connect_bus("scheduler", "scheduler-0"), workers)
            for worker in workers:
                loops.extend(await worker.start())
            loops.extend(await scheduler.start())
            port, operator_port = free_port(), free_port()
            defaults: dict[str, object] = {
                "model": str(model_folder),
                "served_name": MODEL,
                "port": port,
                "operator_port": operator_port,
                "api_key_sha256": (hashlib.sha256(KEY.encode()).hexdigest(),),
                "bus": bus_config,
                "shutdown_grace_s": 1.0,
            }
            running = asyncio.create_task(run(GatewayConfig.model_validate({**defaults, **settings})))
            ends.push_async_callback(cancelled, running)
            url = f"http://127.0.0.1:{port}"
            http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=20)
            operator = httpx.AsyncClient(base_url=f"http://127.0.0.1:{operator_port}", timeout=20)
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
            ends.push_async_callback(http.aclose)
            ends.push_async_callback(operator.aclose)
            ends.push_async_callback(client.close)
            await _until_up(http, running, "/ready" if wait_ready else "/health")
            return Stack(url, port, scheduler, workers, http, operator, client, codec, running)

        yield make
    for loop in loops:
        await cancelled(loop)


@pytest_asyncio.fixture
async def stack(make_stack: MakeStack) -> Stack:
    """A gateway with its defaults."""
    return await make_stack()


async def _until_up(http: httpx.AsyncClient, running: asyncio.Task[None], probe: str) -> None:
    async with asyncio.timeout(20):
        while True:
            assert not running.done(), running
            with suppress(httpx.ConnectError):
                if (await http.get(probe)).status_code == 200:
                    return
            await asyncio.sleep(0.01)
