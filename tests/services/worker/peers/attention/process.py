"""A creditor, as a process: `python -m tests.services.worker.peers.attention.process MODEL BLOCKS NAME`."""

import sys

from bench.micro.distattention.creditor import serve


def modules(architecture: str, blocks: int, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Serve for `creditor_processes`."""
    module = "tests.services.worker.peers.attention.process"
    return {name: (module, architecture, str(blocks), name) for name in names}


def main() -> None:
    from tests.services.worker.conftest import build_model
    from tests.services.worker.peers.attention.rig import DEBTOR, Lender

    serve(Lender(build_model(sys.argv[1]), int(sys.argv[2])).creditor, sys.argv[3], DEBTOR)


if __name__ == "__main__":
    main()
