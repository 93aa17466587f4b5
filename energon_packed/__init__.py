"""Pack conversations with images into fixed-length rows, store them as Megatron-Energon datasets, feed padding-free
batches to Megatron and Hugging Face training.

All public names are here, and are loaded when they are first used: importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from energon_packed.version import __version__

if TYPE_CHECKING:
    from energon_packed.build import PackOptions, PackResult, pack
    from energon_packed.build.options import EncoderOptions
    from energon_packed.conversation import Conversation, MediaReference, Message, normalize
    from energon_packed.dataflow import (
        PackedBatch,
        PackedDataset,
        PackedLoader,
        PackedTaskEncoder,
        PaddingFreeCollator,
        PoolPacker,
        get_packed_loader,
    )
    from energon_packed.encoding import ChatEncoder, EncodedSample, Processor
    from energon_packed.errors import EnergonPackedError
    from energon_packed.flavors import (
        MultiMixQASample,
        PackedCaptioningSample,
        PackedMultiMixQASample,
        PackedTokensSample,
    )
    from energon_packed.packing import PackPlan, pack_lengths
    from energon_packed.shards import PackingManifest, steps_per_epoch

_MODULES = {
    "ChatEncoder": "encoding",
    "Conversation": "conversation",
    "EncodedSample": "encoding",
    "EncoderOptions": "build.options",
    "EnergonPackedError": "errors",
    "MediaReference": "conversation",
    "Message": "conversation",
    "MultiMixQASample": "flavors",
    "PackOptions": "build",
    "PackPlan": "packing",
    "PackResult": "build",
    "PackedBatch": "dataflow",
    "PackedCaptioningSample": "flavors",
    "PackedDataset": "dataflow",
    "PackedLoader": "dataflow",
    "PackedMultiMixQASample": "flavors",
    "PackedTaskEncoder": "dataflow",
    "PackedTokensSample": "flavors",
    "PackingManifest": "shards",
    "PaddingFreeCollator": "dataflow",
    "PoolPacker": "dataflow",
    "Processor": "encoding",
    "get_packed_loader": "dataflow",
    "normalize": "conversation",
    "pack": "build",
    "pack_lengths": "packing",
    "steps_per_epoch": "shards",
}

__all__ = [
    "ChatEncoder",
    "Conversation",
    "EncodedSample",
    "EncoderOptions",
    "EnergonPackedError",
    "MediaReference",
    "Message",
    "MultiMixQASample",
    "PackOptions",
    "PackPlan",
    "PackResult",
    "PackedBatch",
    "PackedCaptioningSample",
    "PackedDataset",
    "PackedLoader",
    "PackedMultiMixQASample",
    "PackedTaskEncoder",
    "PackedTokensSample",
    "PackingManifest",
    "PaddingFreeCollator",
    "PoolPacker",
    "Processor",
    "__version__",
    "get_packed_loader",
    "normalize",
    "pack",
    "pack_lengths",
    "steps_per_epoch",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'energon_packed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"energon_packed.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
