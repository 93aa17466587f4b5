"""Pack conversations with images into rows, store them as Megatron-Energon datasets, feed padding-free
batches to Megatron and Hugging Face training.

The public names are listed in `__init__.pyi`; each is loaded when it is first used.
"""

import warnings
from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_LMMS_ENGINE, _COSMOS = "docs/migrate.md#lmms-engine", "docs/migrate.md#cosmos"
# Names that users of other packages type, their equivalents, and the page that compares them.
_EQUIVALENTS = {
    "DatasetConfig": ("DataflowConfig", _LMMS_ENGINE),
    "MultiModalDataset": ("plan_in_memory(config)", _LMMS_ENGINE),
    "MultiModalIterableDataset": ("PackedIterableDataset(config)", _LMMS_ENGINE),
    "CosmosDataLoader": ("DataflowLoader", _COSMOS),
    "DataDistributor": ("Distributor", _COSMOS),
    "RawItemProcessor": ("Processor", _COSMOS),
    "IdentityProcessor": ("a Processor whose `encode` returns the item", _COSMOS),
    "SampleBatcher": ("Packer", _COSMOS),
    "PoolPackingBatcher": ("PoolPacker", _COSMOS),
    "SequentialPackingBatcher": ("SequentialPacker", _COSMOS),
    "BatchCollator": ("Collator", _COSMOS),
    "VFMListCollator": ("a Collator whose `collate` returns lists", _COSMOS),
    "JointCosmosDataLoader": ("JointLoader", _COSMOS),
}


def __getattr__(name: str) -> Any:
    if name not in _EQUIVALENTS:
        return _load(name)
    equivalent, page = _EQUIVALENTS[name]
    hint = f"energon_packed has no {name}. Use {equivalent}; see {page}."
    warnings.warn(hint, stacklevel=2)  # `from energon_packed import` replaces the message of an AttributeError
    raise AttributeError(hint)
