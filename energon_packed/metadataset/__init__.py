"""Weighted Metadatasets that blend the outputs of several builds.

Energon draws packs, so a weight is a share of the packs drawn. The resulting number of epochs over each input depends
on its number of packs; it is computed and reported.

inputs.py    counts and settings of one input, read from packing.json or the tars
checks.py    compatibility checks between inputs
blend.py     weights and epochs per input
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
