"""Weighted Metadatasets over the outputs of several builds.

Energon draws packs: a weight is a share of draws. How often a data set is then seen depends on how many packs it has,
so that is worked out and told.

inputs.py    one input: its counts and settings, read from packing.json or the tars
checks.py    inputs that do not go together are refused by name
blend.py     weights, and how often each input is seen
render.py    the YAML file
"""

from energon_packed.metadataset.blend import WEIGHT_BY, Blend, epochs_by_weight, make_blend
from energon_packed.metadataset.inputs import BlendInput, has_split, read_input
from energon_packed.metadataset.render import render, write_metadataset

__all__ = [
    "WEIGHT_BY",
    "Blend",
    "BlendInput",
    "epochs_by_weight",
    "has_split",
    "make_blend",
    "read_input",
    "render",
    "write_metadataset",
]
