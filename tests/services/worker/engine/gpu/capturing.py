"""Captures for decodes: CUDA graphs on a device, and on the CPU what a graph does."""

import torch

from services.worker.engine.gpu.graphs import Capture, Compute, CudaCapture, GraphReplay, Results


def capture_for(device: torch.device) -> Capture:
    """The real one where there is a device."""
    return CudaCapture() if device.type == "cuda" else recording


def recording(compute: Compute) -> GraphReplay:
    """The same computation on the same tensors into the same results, whenever it is replayed."""
    logits, hidden = (each.clone() for each in compute())

    def replay() -> Results:
        new_logits, new_hidden = compute()
        return logits.copy_(new_logits), hidden.copy_(new_hidden)

    return replay
