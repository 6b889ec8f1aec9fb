"""The model of six layers on which Pie is tested."""

from typing import Any

import pytest

from tests.services.worker.conftest import new_model

LAYERS = 6


@pytest.fixture(scope="module")
def llama() -> Any:
    return new_model("llama", num_hidden_layers=LAYERS)
