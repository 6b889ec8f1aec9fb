"""`python -m services.ledger`: runs the ledger alone, against a running NATS server."""

from services.ledger.config import LedgerConfig
from services.ledger.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("ledger", LedgerConfig, run)
