"""Jobs whose lengths are predicted, rightly or wrongly, at arrival and whenever a policy asks anew."""

from hypothesis import strategies as st

from services.scheduler.policy.contract import PlannedBatch, PlannedDecode, PlannedPrefill
from tests.services.scheduler.policy.batch_rig import BatchRig, Job
from tests.services.scheduler.policy.test_foresight import says

Guesses = list[tuple[tuple[int, int, int, int], int]]
"""(job as in `Jobs`, predicted length; 0 is none)"""

guesses_of = st.lists(
    st.tuples(
        st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 50), st.integers(0, 12)),
        st.integers(0, 60),
    ),
    min_size=1,
    max_size=25,
)


def items_of(batch: PlannedBatch) -> list[PlannedPrefill | PlannedDecode]:
    """All that the batch computes."""
    return [*batch.prefills, *batch.decodes]


def arrive_foreseen(bench: BatchRig, name: str, prompt: int, length: int, limit: int, guess: int) -> Job:
    job = bench.arrive(name, prompt, length, limit)
    if guess:
        bench.policy.on_predicted(job.task.key, says(guess), bench.now_s)
        bench.policy.check_integrity()
    return job


def play_foreseen(bench: BatchRig, guesses: Guesses) -> None:
    """All of them, to their ends; questions are answered with a quarter more than is there."""
    before = bench.on_batch

    def answer(batch: PlannedBatch) -> None:
        before(batch)
        for question in batch.questions:
            longer = says(question.generated_tokens + max(1, question.generated_tokens // 4))
            bench.policy.on_predicted(question.key, longer, bench.now_s)
            bench.policy.check_integrity()

    bench.on_batch = answer
    for number, ((prompt, length, limit, pause), guess) in enumerate(guesses):
        arrive_foreseen(bench, f"r{number:02}", prompt, length, limit, guess)
        for _ in range(pause):
            bench.turn()
    bench.finish()
