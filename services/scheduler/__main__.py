"""Entry point of `python -m services.scheduler`, which runs the scheduler alone."""

from services.scheduler.config import SchedulerConfig
from services.scheduler.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("scheduler", SchedulerConfig, run)
