"""Python code that loads a packed dataset: a manifest in, the lines that `pack` and `inspect` print out.

packing.json has the same lines, with the variable `path` for the folder, so that a copied folder has no old path. The
code is made from the settings of the manifest alone; lines that a file contains are never printed or run.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_packed.encoding import EncoderSettings
from energon_packed.encoding.vision.families import ambiguous
from energon_packed.encoding.vision.settings import load_vision
from energon_packed.errors import ConfigError
from energon_packed.formats import codec_for
from energon_packed.options import declared, make
from energon_packed.shards.manifest import PackingManifest
from energon_packed.shards.nv_meta import SPLITS
from energon_packed.shards.steps import steps_of_ranks

RANKS: Mapping[str, int] = {"world_size": 1, "micro_batch_size": 1, "num_workers": 2}
"""Ranks and loader workers in the code if the caller chooses no others."""
_BUFFER = 100  # samples that are packed at a time while training, for datasets of single samples
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def loading_code(
    manifest: PackingManifest,
    path: Path | None = None,
    *,
    ranks: Mapping[str, int] = RANKS,
) -> list[str]:
    """Return lines of Python that load the first batch of a dataset, and compute its steps per epoch.

    Args:
        manifest: manifest of the dataset.
        path: folder of the dataset; by default, the code uses a variable `path`.
        ranks: `world_size`, `micro_batch_size` and `num_workers`.

    Returns:
        4 to 6 lines; [] for a dataset without packs.
    """
    if not manifest.packs:
        return []
    split = next(name for name in SPLITS if manifest.packs_in(name))
    folder = "path" if path is None else _literal(str(path.parent if path.name == "webdataset" else path))
    names, lines = ["get_packed_loader"], []
    arguments = [folder]
    # Stored tokens need an encoder only for their media.
    if not codec_for(manifest.sample_class).stores_tokens or manifest.images or manifest.videos or manifest.audios:
        line, is_pretrained = _encoder_line(manifest)
        lines.append(line)
        arguments.append("encoder")
        names += ["ChatEncoder"] if is_pretrained else []
    of_split = [] if split == "train" else [f"split={_literal(split)}"]
    batches = [f"micro_batch_size={ranks['micro_batch_size']}", f"num_workers={ranks['num_workers']}"]
    arguments += [*of_split, *batches, "epochs=1"]
    if manifest.pad_multiple > 1:
        names.append("PaddingFreeCollator")
        arguments.append(f"collator=PaddingFreeCollator(pad_multiple={manifest.pad_multiple})")
    if manifest.algorithm == "none":
        arguments.append(f"packing_buffer_size={_BUFFER}")
    else:  # otherwise packing on the fly decides the number of rows
        names.append("steps_per_epoch")
        # With `epoch_end="repeat"`, all ranks have the steps of the rank with the most.
        of_ranks = steps_of_ranks(
            [(manifest.packs_in(split), 1)],
            world_size=ranks["world_size"],
            micro_batch_size=ranks["micro_batch_size"],
            num_workers=ranks["num_workers"],
        )
        of_steps = ", ".join([folder, f"world_size={ranks['world_size']}", *batches, *of_split])
        lines.append(f"steps = steps_per_epoch({of_steps})  # of each rank: {max(of_ranks)}")
    lines.append(f"loader = get_packed_loader({', '.join(arguments)})")
    lines.append("batch = next(iter(loader))  # batch.transformers_inputs() or batch.megatron_inputs()")
    return [f"from energon_packed import {', '.join(sorted(names))}", *lines]


def _encoder_line(manifest: PackingManifest) -> tuple[str, bool]:
    """Line that makes the encoder, with a comment on an ambiguous `factor`, and whether it loads a ChatEncoder."""
    custom = manifest.encoder.get("processor_class")
    if custom is not None:
        # The name is of a file: nothing else than a name may become part of the code.
        name = str(custom) if _CLASS.fullmatch(str(custom)) else "Processor"
        return f"encoder = ...  # the {name} that packed the data", False
    defaults = {setting.name: setting.default for setting in declared(EncoderSettings)}
    given = {name: value for name, value in manifest.encoder.items() if name in defaults and value != defaults[name]}
    arguments = [_literal(given.pop("tokenizer", None))]
    arguments += [f"{name}={_literal(value)}" for name, value in given.items()]
    line = f"encoder = ChatEncoder.from_pretrained({', '.join(arguments)})"
    if "factor" in given and (layouts := _ambiguous_layouts(manifest)):
        line += f"  # {ambiguous(layouts)}: add vision_family, patch_size or merge_size"
    return line, True


def _ambiguous_layouts(manifest: PackingManifest) -> tuple[tuple[int, int], ...]:
    try:
        vision = load_vision(make(EncoderSettings, manifest.encoder))
    except ConfigError:  # its folder is on another machine
        return ()
    return () if vision is None else vision.ambiguous_layouts


def _literal(value: Any) -> str:
    """Python literal of a plain value; strings in double quotes, if that needs no more escapes."""
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and '"' not in value and "'" not in value else text
