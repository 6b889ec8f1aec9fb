"""A creditor, as a process: `python -m tests.services.worker.peers.attention.process MODEL BLOCKS NAME`."""

import sys

from bench.micro.distattention.creditor import serve


def modules(architecture: str, blocks: int, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Serve for `creditor_processes`."""
    module = "tests.services.worker.peers.attention.process"
    return {name: (module, architecture, str(blocks), name) for name in names}


def main() -> None:
    from services.worker.peers.attention.core.cost import ComputeBudget
    from services.worker.peers.attention.creditor import Creditor
    from services.worker.peers.attention.memory import device_memory
    from tests.services.worker.conftest import build_model
    from tests.services.worker.peers.attention.rig import BLOCK_TOKENS, DEBTOR, GRANT, GrantBook, make_engine

    architecture, blocks, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    engine = make_engine(build_model(architecture), blocks)
    book = GrantBook()
    book.grant(DEBTOR.worker_id, GRANT, range(blocks))
    creditor = Creditor(device_memory(engine.attention), book, ComputeBudget(1.0), block_tokens=BLOCK_TOKENS)
    serve(creditor, name, DEBTOR)


if __name__ == "__main__":
    main()
