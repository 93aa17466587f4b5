"""Input files in, raw records out: a class per file format, tried in the order of `registry.SOURCES`.

registry.py: paths, globs and folders -> sources, with folders.py, folder_entries.py and config.py (settings per
source). base.py: Source, the base class. json.py: .jsonl in place by byte ranges; .json and compressed files rewritten
once. listed.py: records that several files make. arrow.py: .arrow memory-mapped; .parquet rewritten once. csv.py.
imagefolder.py: metadata files beside images; save_to_disk folders. speech.py: LibriSpeech, Common Voice, Kaldi.
webdataset.py, tar_records.py: tars in place by byte offsets, their keys as records. energon.py, energon_layout.py,
sample_loader.py: Energon datasets, by dataset.yaml and field_map, or by their own code if trusted. convert.py:
converted copies. To add a file format, write a subclass of `Source` with `@register_source`.
"""

from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Source, SourceRecord
from energon_packed.sources.config import SourceConfig
from energon_packed.sources.json import JsonlSource
from energon_packed.sources.registry import known_formats, open_sources, refuse_outputs, register_source

__all__ = [
    "ArrowSource",
    "JsonlSource",
    "Source",
    "SourceConfig",
    "SourceRecord",
    "known_formats",
    "open_sources",
    "refuse_outputs",
    "register_source",
]
