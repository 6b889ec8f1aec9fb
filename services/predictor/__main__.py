"""`python -m services.predictor`: run the predictor alone against a running NATS server.

With `train` or `evaluate` as the first argument it runs that command, without a bus.
"""

import sys

from shared.bus import run_main

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("train", "evaluate"):
        from services.predictor.command import main

        sys.exit(main(sys.argv[1:]))
    from services.predictor.config import PredictorConfig
    from services.predictor.service import run

    run_main("predictor", PredictorConfig, run)
