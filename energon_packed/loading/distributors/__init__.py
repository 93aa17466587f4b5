"""Distributors: data to the items of each rank and worker, in an order that resumes.

| module | content |
|---|---|
| base.py | Distributor, the base class, and Item |
| datasets.py | map-style datasets, iterables, and files that are each read by a single worker |
| records.py | raw records of the sources that `pack` reads |
| energon.py | packs in the order of Energon's loader |
| mixture.py | several distributors by weight |
| schedule.py | weights that change during training |
"""
