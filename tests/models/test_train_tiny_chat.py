"""The training package: cleaning and cutting of texts, packing, the loss, the network against transformers.

No test needs the data sets: texts are small and made here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from models.train_tiny_chat.answers import cut
from models.train_tiny_chat.books import continuation, paragraphs, reading, sentence_with_word, sentences
from models.train_tiny_chat.chat import Chat, ask
from models.train_tiny_chat.endings import correction, loop_start
from models.train_tiny_chat.evaluate import percentile, pick
from models.train_tiny_chat.export import export_model
from models.train_tiny_chat.generation import Answer
from models.train_tiny_chat.loss import tied_cross_entropy
from models.train_tiny_chat.model import Shape, TinyLlama
from models.train_tiny_chat.packing import IGNORED, RowPacker, encode_chat, fit_answer
from models.train_tiny_chat.stories import Cast, story
from models.train_tiny_chat.templates import TASKS, template_chat
from models.train_tiny_chat.tokenizer import save_tokenizer, token_id, train_tokenizer
from models.train_tiny_chat.train import learning_rate_factor, stage_at

SMALL = Shape(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
BOOK = [f"The {n} old men walked slowly through the valley in the evening." for n in range(200)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["The old men walked. Tell me a story about the valley."] * 3, 300)


def test_books_lose_licence_headings_and_line_breaks(tmp_path: Path) -> None:
    body = (
        "CHAPTER I\n\nIt was a long and quiet evening in the old house,\nand “nobody” spoke a word there.\n\n"
    )
    (tmp_path / "gutenberg").mkdir()
    (tmp_path / "gutenberg" / "pg1_a_book.txt").write_text(
        f"Licence text.\n*** START OF THIS PROJECT GUTENBERG EBOOK A BOOK ***\n\n{body}"
        "*** END OF THIS PROJECT GUTENBERG EBOOK A BOOK ***\nMore licence text that is long enough to keep.\n"
    )
    expected = 'It was a long and quiet evening in the old house, and "nobody" spoke a word there.'
    assert paragraphs(tmp_path) == [[expected]]


def test_abbreviations_do_not_end_sentences() -> None:
    assert sentences("Then Mr. Brown came in. He sat down.") == ["Then Mr. Brown came in.", "He sat down."]


def test_book_tasks_answer_what_they_ask() -> None:
    rng = random.Random(1)
    made = [chat for _ in range(50) if (chat := sentence_with_word(BOOK, rng))]
    assert made
    for chat in made:
        question, answer = chat.turns[0][1], chat.answer()
        assert answer in BOOK and any(word.strip(",.") in answer for word in question.split()[-6:])
    for _ in range(50):
        chat = continuation(BOOK, rng)
        assert chat is not None
        last_given = chat.turns[0][1].split(": ", 1)[1].split(". ")[-1].rstrip(".") + "."
        first_answer = sentences(chat.answer())[0]
        assert BOOK.index(first_answer) == BOOK.index(last_given) + 1 and reading(BOOK, rng) is not None


def test_cut_keeps_whole_sentences() -> None:
    assert cut("One is here. Two is here. Three is here.", 26) == "One is here. Two is here."
    assert cut("A first sentence that is longer. Two.", 5) == "A first sentence that is longer."


def test_stories_grow_with_the_days_asked_for() -> None:
    who = Cast("Anna", True, "dog", "key", "old", "inn")
    lengths = [len(story(who, days, random.Random(0)).split()) for days in (0, 2, 5)]
    assert lengths == sorted(set(lengths))
    text = story(who, 5, random.Random(0))
    assert "fifth day" in text and "sixth day" not in text
    assert "{" not in text and " a inn" not in text


def test_every_exercise_is_a_question_with_an_answer_and_repeats_with_its_seed() -> None:
    for make, _ in TASKS:
        for seed in range(40):
            chat = make(random.Random(seed))
            assert [role for role, _ in chat.turns] == ["user", "assistant"]
            assert all(text.strip() and "{" not in text for _, text in chat.turns)
            assert chat == make(random.Random(seed))
    assert any(len(template_chat(random.Random(seed)).turns) > 3 for seed in range(40))


def test_answers_are_cut_at_a_sentence_within_the_tokens(tokenizer: Tokenizer) -> None:
    text = "The old men walked. " * 20
    short = fit_answer(text.strip(), tokenizer, 30)
    assert short is not None and short.endswith("walked.")
    assert len(tokenizer.encode(short, add_special_tokens=False).ids) < 30
    assert fit_answer("no sentence ends " * 50, tokenizer, 30) is None


def test_encoded_chat_marks_the_answer_and_its_end_only(tokenizer: Tokenizer) -> None:
    encoded = encode_chat(ask("k", "Tell me.", "The valley."), tokenizer)
    assert encoded is not None
    wanted = [t for t, is_answer in zip(encoded.tokens, encoded.is_answer, strict=True) if is_answer]
    assert tokenizer.decode(wanted, skip_special_tokens=False) == "The valley.<|end|>"
    rendered = tokenizer.decode(encoded.tokens, skip_special_tokens=False)
    assert rendered == "<|bos|><|user|>Tell me.<|end|><|assistant|>The valley.<|end|>"


def test_rows_hold_whole_chats_and_targets_are_the_next_tokens(tokenizer: Tokenizer) -> None:
    encoded = encode_chat(ask("k", "Tell me.", "The valley."), tokenizer)
    assert encoded is not None
    books = [7] * 50
    inputs, targets = RowPacker(books, [encoded], seed=0).batch(2, 64, 1.0, answers_only=True)
    assert inputs.shape == targets.shape == (2, 64)
    bos, end = token_id(tokenizer, "<|bos|>"), token_id(tokenizer, "<|end|>")
    chats_in_row = 65 // len(encoded.tokens)
    assert (inputs == bos).sum(1).tolist() == [chats_in_row] * 2
    assert (targets == end).sum(1).tolist() == [chats_in_row] * 2
    kept = targets[:, :-1] != IGNORED
    assert torch.equal(targets[:, :-1][kept], inputs[:, 1:][kept])
    everything = RowPacker(books, [encoded], seed=0).batch(2, 64, 1.0, answers_only=False)[1]
    assert (everything != IGNORED).all()


def test_packing_repeats_with_its_seed(tokenizer: Tokenizer) -> None:
    chats = [encode_chat(ask("k", f"Tell me {n}.", "The valley."), tokenizer) for n in range(9)]
    known = [chat for chat in chats if chat]
    batches = [RowPacker(list(range(50)), known, seed).batch(4, 64, 0.5, False)[0] for seed in (1, 1, 2)]
    assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])


def test_loss_and_gradients_are_those_of_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (700,))
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = tied_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), wanted)


@pytest.mark.parametrize("tokens", [40, 600])
def test_network_is_the_llama_of_transformers(tokenizer: Tokenizer, tmp_path: Path, tokens: int) -> None:
    model = TinyLlama(SMALL, seed=3)
    export_model(model, tokenizer, tmp_path)
    save_tokenizer(tokenizer, tmp_path, 4096)
    stored = load_file(tmp_path / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in stored.items()})
    loader: Any = AutoModelForCausalLM
    peer = loader.from_pretrained(tmp_path, dtype=torch.float32)
    inputs = torch.randint(0, 300, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = F.linear(model.hidden(inputs), model.model.embed_tokens.weight)
        torch.testing.assert_close(logits, peer(inputs).logits, atol=1e-4, rtol=1e-4)


def test_loops_are_found_and_end_after_one_repetition(tokenizer: Tokenizer) -> None:
    assert loop_start(list(range(100))) is None and loop_start([1, 2, *range(20, 40), *range(20, 40)]) == 22
    good, loop = "The old men walked. ", "Tell me a story about the valley and the old men in it. "
    tokens = tokenizer.encode(good + loop * 6, add_special_tokens=False).ids
    fixed = correction(Answer("<|bos|><|assistant|>", tokens, "", ended=False), tokenizer)
    assert fixed is not None
    text = tokenizer.decode(fixed.tokens, skip_special_tokens=False)
    assert text == f"<|bos|><|assistant|>{good}{loop}{loop.strip()}<|end|>"
    assert fixed.is_answer == [False] * (len(fixed.tokens) - 1) + [True]
    endless = tokenizer.encode("the men, " * 60, add_special_tokens=False).ids
    fixed = correction(Answer("<|bos|><|assistant|>", endless, "", ended=False), tokenizer)
    assert fixed is not None
    assert tokenizer.decode(fixed.tokens, skip_special_tokens=False).endswith("the men.<|end|>")
    assert len(fixed.tokens) < 30 and fixed.is_answer[-3:] == [False, True, True]


def test_schedule_lands_at_zero_and_ends_with_long_chats() -> None:
    factors = [learning_rate_factor(used / 100) for used in range(101)]
    assert max(factors) == 1.0 and factors[0] < 0.2
    assert factors[-1] == 0.0 and factors[50:] == sorted(factors[50:], reverse=True)
    shares = [stage_at(used / 100).chat_share for used in range(101)]
    assert shares == sorted(shares) and stage_at(1.0).row_tokens == 2048


def test_evaluation_counts() -> None:
    assert [percentile(list(range(1, 101)), share) for share in (0.1, 0.5, 0.99)] == [11, 51, 100]
    chats = [Chat(kind, (("user", "q"), ("assistant", "a"))) for kind in "abab"]
    assert [chat.kind for chat in pick(chats, 1)] == ["a", "b"]
