"""`python -m services.worker`: one worker alone, against a NATS server that runs already."""

from services.worker.config import WorkerConfig
from shared.bus import run_main


async def _run(config: WorkerConfig) -> None:
    from services.worker.service import run  # torch takes seconds: the settings are judged before

    await run(config)


if __name__ == "__main__":
    run_main("worker", WorkerConfig, _run)
