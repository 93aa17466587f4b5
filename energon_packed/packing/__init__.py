"""Packing planner: sample lengths -> a PackPlan, which samples share a row. Arrays only: no file I/O, no torch.

planner.py   lengths (n,) ──► algorithm ──► Placement(order, pack_at) ──► PackPlan(indices (n,), offsets (P+1,))
kernels.py   the algorithms, compiled with Numba
balance.py   costs of rows (P,) ──► rows of each step and rank
"""

from energon_packed.packing.planner import PackPlan, algorithm_names, check_algorithm, load_kernels, pack_lengths

__all__ = ["PackPlan", "algorithm_names", "check_algorithm", "load_kernels", "pack_lengths"]
