"""Packed datasets, map-style: dataset.py, over folder_packs.py (packs of a folder) and map_data.py (base class).

manifests.py and trust.py: what a dataset contains, and that it runs no code. recorded_lengths.py: sizes of its packs.
"""
