"""Nothing here runs where vLLM is not set up; the reason is told."""

import os

import pytest

from tests.stack.running import ROOT

PYTHON = ROOT / os.environ.get("KVASIR_STACK__VLLM_PYTHON", ".venv-vllm/bin/python")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vLLM is not set up: make setup-vllm")
    for item in items:
        if item.path.parent.name == "vllm" and item.path.parents[1].name == "tests":
            item.add_marker(pytest.mark.vllm)
            if not PYTHON.exists():
                item.add_marker(missing)
