"""What tests/processes.py imports once, for all processes that it forks."""

import contextlib
import importlib
import os
import warnings

import torch

from energon_packed.packing.planner import load_kernels
from tests.frozen import freeze

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # the command line sets it before it imports Transformers

_MODULES = (
    "torch.distributed",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "megatron.energon",
    "megatron.energon.cli.main",
    "energon_packed.cli.main",
    "energon_packed.cli.pack",
    "energon_packed.cli.lengths",
    "energon_packed.cli.verify",
    "energon_packed.cli.metadataset",
    "energon_packed.cli.nv_meta",
    "energon_packed.pipeline.run",
    "energon_packed.encoding",
    "energon_packed.encoding.patch_kernel",
    "energon_packed.dataflow",
    "energon_packed.dataflow.energon.loader",
    "energon_packed.integrations.megatron",
    "megatron.core.parallel_state",
)

for _name in _MODULES:
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):
        importlib.import_module(_name)

load_kernels()
torch.set_num_threads(1)  # tests run side by side
freeze()
