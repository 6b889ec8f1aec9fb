"""lm-eval-harness scores a task through the gateway as it does with its own model on the same checkpoint."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from tests.clients.serving import ROOT, Serving

TINY_CHAT = ROOT / "models" / "tiny_chat"
QUESTIONS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("A dog is an", (" animal", " number", " colour"), 0),
    ("The sky is", (" blue", " loud", " seven"), 0),
    ("Two and two is", (" four", " green", " a river"), 0),
    ("In the morning the sun", (" rises", " sleeps in a box", " is a fish"), 0),
    ("You read a", (" stone", " book", " cloud"), 1),
    ("Fish live in", (" fire", " the sky", " water"), 2),
    ("Bread is something to", (" eat", " fly", " sing"), 0),
    ("At night we", (" sleep", " swim to the moon", " are wood"), 0),
    ("She opened the", (" why", " door", " nine"), 1),
    ("The week has seven", (" days", " noses", " songs"), 0),
)
MODEL = {"add_bos_token": True}
"""As the model was trained. Unless it is said, lm-eval's own begins with one, that behind an API does not."""
TASK = """
task: small_choices
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: question
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
num_fewshot: 0
metric_list:
  - metric: acc
  - metric: acc_norm
metadata: {{version: 1}}
"""


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    rows = [{"question": ask, "choices": list(answers), "answer": right} for ask, answers, right in QUESTIONS]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small_choices.yaml").write_text(TASK.format(data=data))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def scored(tasks: TaskManager, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    found: Any = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["small_choices"], task_manager=tasks, log_samples=True
    )
    samples = sorted(found["samples"]["small_choices"], key=lambda sample: int(sample["doc_id"]))
    likelihoods = [[float(choice[0][0]) for choice in sample["resps"]] for sample in samples]
    results = found["results"]["small_choices"].items()
    figures = {name: value for name, value in results if "stderr" not in name}
    return {"figures": figures, "likelihoods": likelihoods}


@pytest.mark.timeout(540)
def test_the_figures_are_equal(stack: Serving, tasks: TaskManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", stack.key)
    own = scored(tasks, "hf", {**MODEL, "pretrained": str(TINY_CHAT), "dtype": "float32", "device": "cpu"})
    through = scored(
        tasks,
        "local-completions",
        {
            **MODEL,
            "model": stack.model,
            "base_url": f"{stack.base_url}/completions",
            "tokenizer": str(TINY_CHAT),
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": 4,
            "max_length": 1024,
        },
    )
    print(own["figures"])
    assert through["figures"] == own["figures"]
    for mine, theirs in zip(through["likelihoods"], own["likelihoods"], strict=True):
        assert mine == pytest.approx(theirs, abs=2e-3)
    assert 0 < own["figures"]["acc,none"] <= 1
