"""`python -m services.placement`: placement alone, against a NATS server that runs already."""

from services.placement.config import PlacementConfig
from services.placement.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("placement", PlacementConfig, run)
