"""Synthetic dataset and tokenizer, generated offline, for `energon-packed demo`, tests and benchmarks."""

from energon_packed.demo.dataset import DemoDataset, write_dataset
from energon_packed.demo.tokenizer import write_tokenizer

__all__ = ["DemoDataset", "write_dataset", "write_tokenizer"]
