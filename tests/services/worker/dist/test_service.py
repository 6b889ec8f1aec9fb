"""What a worker sets aside for its neighbours' blocks. The rest is seen live (`tests/stack`)."""

from services.worker.dist.service import staged_blocks
from services.worker.lending.settings import LendingConfig


def test_stagings_are_paid_for_in_own_blocks() -> None:
    config = LendingConfig(borrow=True, staging_blocks=2, most_creditors=8)
    assert staged_blocks(config, layers=8) == 4
    assert staged_blocks(config, layers=3) == 11
    assert staged_blocks(config.model_copy(update={"borrow": False}), layers=8) == 0
