"""`python -m services.gateway`: configuration, logging, run."""

from services.gateway.config import GatewayConfig
from services.gateway.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("gateway", GatewayConfig, run)
