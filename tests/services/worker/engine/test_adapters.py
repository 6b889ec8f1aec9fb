"""Which folders are LoRA adapters, and of which rank; and that a model's digest covers them."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine.adapters import largest_rank
from services.worker.engine.checkpoint import checkpoint_digest
from shared.errors import ConfigError
from tests.stack.running import TINY_CHAT


def adapter(folder: Path, weights: bytes = b"w", **fields: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, **fields}))
    (folder / "adapter_model.bin").write_bytes(weights)
    return str(folder)


def test_the_rank_is_one_of_vllms_that_holds_all(tmp_path: Path) -> None:
    small, large = adapter(tmp_path / "a", r=4), adapter(tmp_path / "b", rank_pattern={"q_proj": 33})
    assert [largest_rank(each) for each in ({}, {"a": small}, {"a": small, "b": large})] == [8, 8, 64]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 513}, "its rank is 513, and vLLM's largest is 512: train it with a smaller r"),
        ({"r": None}, "gives no rank `r`"),
        ({"r": 0}, "gives no rank `r`"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        largest_rank({"a": adapter(tmp_path / "a", **fields)})
    assert caught.value.param == "vllm.adapters"


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.bin"])
def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path, missing: str) -> None:
    path = adapter(tmp_path / "a")
    (tmp_path / "a" / missing).unlink()
    with pytest.raises(ConfigError, match=f"{path} has no {missing[:13]}.*save_pretrained wrote, or"):
        largest_rank({"a": path})


def test_another_name_configuration_or_weight_is_another_digest(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "a"), adapter(tmp_path / "b", lora_alpha=2)
    three = adapter(tmp_path / "c", b"x")
    each: list[dict[str, str]] = [{}, {"a": one}, {"b": one}, {"a": two}, {"a": three}, {"a": one, "b": two}]
    assert len({checkpoint_digest(str(TINY_CHAT), "float32", adapters) for adapters in each}) == len(each)
    assert checkpoint_digest(str(TINY_CHAT), "float32") == checkpoint_digest(str(TINY_CHAT), "float32", {})
    both = {"b": two, "a": one}
    assert checkpoint_digest(str(TINY_CHAT), "float32", both) == checkpoint_digest(
        str(TINY_CHAT), "float32", each[-1]
    )
