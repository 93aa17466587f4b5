"""Costs of rows: sizes of rows and a model's configuration in, compute cost of each row and imbalance of steps out.

model.py   CostModel, RowSizes: sizes (P,) ──► cost of each row (P,); constants from a configuration or times
flops.py   a configuration of Transformers or Megatron ──► floating point operations of a token, a square and a patch

`packing/balance.py` assigns rows to steps and ranks by their costs.
"""
