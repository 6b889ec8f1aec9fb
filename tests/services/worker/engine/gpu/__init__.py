"""Tests of the engine's parts for CUDA devices: interpreted here, compiled where there is a device."""
