"""Modules that tests/processes.py imports once, for all processes that it forks."""

import contextlib
import importlib
import os
import warnings

import torch

from tests.frozen import freeze
from tests.internals import PRELOADED

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # the command line sets it before it imports Transformers

_MODULES = (
    "torch.distributed",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "megatron.energon",
    "megatron.energon.cli.main",
    *PRELOADED,
    "megatron.core.parallel_state",
    "transformers.trainer",
)

for _name in _MODULES:
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):
        importlib.import_module(_name)

torch.set_num_threads(1)  # tests run side by side
freeze()
