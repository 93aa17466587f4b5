"""Checkpoints of several processes on the CPU, loaded with the oldest Transformers; import it in each process."""

import torch

# Transformers 5.16 loads the optimizer to `cpu:0` if several processes train on the CPU, and torch knows only `cpu`.
torch.serialization.register_package(
    0, lambda storage: None, lambda storage, device: storage if device == "cpu:0" else None
)
