"""What an iteration computes, counted apart for prompts and answers."""

from services.worker.core.plans import QueuedPlan
from services.worker.core.sequence import HeldSequence
from services.worker.core.step_work import StepWork, WorkItem
from tests.services.worker.builders import plan, ref, spec


def test_tokens_of_prompts_and_of_answers_are_counted_apart() -> None:
    held = HeldSequence.from_spec(spec(ref(), [1, 2, 3, 4, 5]), 64, now_s=0.0)
    items = (
        WorkItem(held, 0, 3, samples=False, is_decode=False),
        WorkItem(held, 3, 5, samples=True, is_decode=False),
        WorkItem(held, 5, 6, samples=True, is_decode=True),
    )
    work = StepWork(QueuedPlan(plan(1), 0.0), items, (), ())
    assert (work.prefilled_tokens, work.decoded_tokens) == (5, 1)
