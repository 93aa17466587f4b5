"""Packing planner: sample lengths -> a PackPlan, which samples share a row. Arrays only: no file I/O, no torch.

planner.py   lengths (n,) ──► the places of all samples ──► PackPlan(indices (n,), offsets (P+1,))
counts.py    samples of each length (capacity + 1,) ──► CountPlan(patterns, how often each is used)
placing.py   the algorithms, on counts of lengths
balance.py   costs of rows (P,) ──► rows of each step and rank
"""

from energon_packed.packing.counts import CountPlan, plan_counts
from energon_packed.packing.planner import PackPlan, algorithm_names, check_algorithm, pack_lengths

__all__ = ["CountPlan", "PackPlan", "algorithm_names", "check_algorithm", "pack_lengths", "plan_counts"]
