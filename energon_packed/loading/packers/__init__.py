"""Packers: lengths of buffered samples to groups of samples, one group for each row.

| module | content |
|---|---|
| base.py | Packer, the base class with the limits of a row |
| simple.py | PlannedPacker, SequentialPacker, SimpleBatcher: rows of consecutive items |
| pool.py | PoolPacker, BalancedPoolPacker: best fit over a buffer |
"""
