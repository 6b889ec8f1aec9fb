"""`python -m services.worker`: one worker alone, against a NATS server that runs already."""

from services.worker.config import WorkerConfig
from services.worker.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("worker", WorkerConfig, run)
