"""Input files in, raw records out: a class per file format, tried in the order of `registry.SOURCES`.

registry.py         paths, globs and folders -> sources
config.py           SourceConfig: an input with per-source settings
base.py             Source, the base class: records in order and by address
json.py             .jsonl .ndjson, read in place by byte ranges (.gz and .zst are decompressed once);
                    .json, an array is rewritten once as JSONL
arrow.py            .arrow .feather, memory-mapped; .parquet, rewritten once as Arrow
csv.py              .csv .tsv, rewritten once as Arrow
imagefolder.py      metadata.jsonl, metadata.csv beside images; save_to_disk folders of Hugging Face
folders.py          folders of files, and names of the Hugging Face Hub
webdataset.py       .tar, read in place by byte offsets
tar_records.py      the members of a tar key -> records
energon.py          folders with .nv-meta, and Metadatasets
energon_layout.py   dataset.yaml and field_map -> records
sample_loader.py    code of a dataset, run only if it is trusted
convert.py          converted copies

To add a file format, write a subclass of `Source` with `@register_source`.
"""

from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Source, SourceRecord
from energon_packed.sources.config import SourceConfig
from energon_packed.sources.json import JsonlSource
from energon_packed.sources.registry import known_formats, open_sources, register_source

__all__ = [
    "ArrowSource",
    "JsonlSource",
    "Source",
    "SourceConfig",
    "SourceRecord",
    "known_formats",
    "open_sources",
    "register_source",
]
