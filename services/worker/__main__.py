"""`python -m services.worker` runs a single worker against a running NATS server."""

from services.worker.config import WorkerConfig
from services.worker.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("worker", WorkerConfig, run)
