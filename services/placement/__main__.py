"""`python -m services.placement`: run placement alone against a running NATS server."""

from services.placement.config import PlacementConfig
from services.placement.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("placement", PlacementConfig, run)
