"""`python -m services.predictor`: the predictor alone, against a NATS server that runs already."""

from services.predictor.config import PredictorConfig
from services.predictor.service import run
from shared.bus import run_main

if __name__ == "__main__":
    run_main("predictor", PredictorConfig, run)
