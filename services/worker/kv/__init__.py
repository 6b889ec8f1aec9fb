"""Where a worker's keys and values are: counts and block ids here, tensors in `services.worker.engine`."""
