"""Short ways to write the messages that tests of the worker's cores are full of."""

from services.worker.core.sequences import SequenceLimits

LIMITS = SequenceLimits(max_context_tokens=64, vocabulary=100, end_retention_s=60.0, gateway_timeout_s=10.0)
