"""The model of six layers on which Pie is tested."""

from typing import Any

import pytest
import torch
import transformers

from tests.services.worker.conftest import VOCABULARY

LAYERS = 6


@pytest.fixture(scope="module")
def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(7)
    model: Any = transformers.LlamaForCausalLM(config)
    return model.eval()
