"""Packing planner: assigns samples to rows. Works on arrays only; no file I/O, no torch.

lengths (n,) ──► algorithm ──► Placement(order, pack_at) ──► PackPlan(indices (n,), offsets (P+1,))
costs (P,) ──► balance ──► rows of each step and rank
"""

from energon_packed.packing.balance import CostModel, RowSizes
from energon_packed.packing.planner import PackPlan, algorithm_names, check_algorithm, load_kernels, pack_lengths

__all__ = ["CostModel", "PackPlan", "RowSizes", "algorithm_names", "check_algorithm", "load_kernels", "pack_lengths"]
