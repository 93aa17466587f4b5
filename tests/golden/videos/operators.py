"""Makes torchvision importable without its compiled extension; import it before Transformers uses a video processor.

The extension on PyPI needs CUDA. The video processors use none of its operators, but torchvision expects their schemas
when it is imported.
"""

import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
