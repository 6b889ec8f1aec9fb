"""`python -m services.scheduler`: runs the scheduler alone."""

from services.scheduler.config import SchedulerConfig
from services.scheduler.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("scheduler", SchedulerConfig, run)
