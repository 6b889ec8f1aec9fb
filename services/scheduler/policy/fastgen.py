"""`fastgen`: decodes first, then prompts cut so that every step computes the target forward size.

Dynamic SplitFuse: whatever the decodes leave of `tfs_tokens` is filled with prompts in the order of arrival,
the last of them cut to land exactly on it (so prompts are always chunked here, whatever `chunked_prefill`
says). Blocks are taken as chunks and tokens need them: a prompt starts where its first chunk fits, without a
look at the rest of it, and when no block is left the newest gives up its own and is computed again.

Option `tfs_tokens`: the target forward size, at most the token budget, which it defaults to.
Source: algorithms.md §1 and papers/003 §2 for FastGen as a rival; how batches are put together is in
`first_come.py`.
"""

from dataclasses import replace

from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape
from services.scheduler.policy.first_come import Draft, FirstComePolicy
from services.scheduler.policy.options import read_options
from services.scheduler.policy.progress import Entry


class FastGenPolicy(FirstComePolicy):
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        options = read_options("fastgen", settings.options, {"tfs_tokens": settings.token_budget})
        size_tokens = min(int(options["tfs_tokens"]), settings.token_budget)
        super().__init__(shape, replace(settings, chunked_prefill=True, token_budget=size_tokens))

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = self._draft()
        if not draft.preempted:
            self._admit(draft)
        return self._commit(draft)

    def _target_blocks(self, entry: Entry, tokens: int) -> int:
        return self._blocks(tokens)

    def _can_start(self, draft: Draft, entry: Entry) -> bool:
        return self._blocks(self._chunk(draft, entry.prefill_tokens)) <= draft.free_blocks
