"""Declare the operators of a torchvision without a build for this machine: `import torchvision_operators`.

PyPI has torchvision for CUDA only. Its Python part, with which image and video processors work, imports if two
operators that they do not call exist. Imported before Transformers, which tries to import torchvision.
"""

from importlib.util import find_spec

import torch

if find_spec("torchvision") is not None and not hasattr(torch.ops.torchvision, "nms"):
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
