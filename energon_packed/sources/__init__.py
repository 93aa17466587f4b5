"""Input files: one class per container format, tried in the order of `registry.SOURCES`.

jsonl.py         .jsonl .ndjson, read in place by byte ranges; .gz and .zst are decompressed once
json.py          .json, an array is rewritten once as JSONL
arrow.py         .arrow .feather, memory-mapped
parquet.py       .parquet, rewritten once as Arrow
csv.py           .csv .tsv, rewritten once as Arrow
imagefolder.py   metadata.jsonl, metadata.csv beside images
hugging_face.py  save_to_disk folders
webdataset.py    .tar, read in place by byte offsets
    tar_index.py        where each key begins
    tar_records.py      the parts of a key -> records
energon.py       folders with .nv-meta, and Metadatasets
    energon_layout.py   what dataset.yaml and split.yaml say
    sample_loader.py    code of a dataset, run where it is trusted
    energon_flavors.py  standard flavors by field_map -> records
folders.py       folders of files, and names of the Hugging Face Hub
config.py        SourceConfig: an input with settings of its own
registry.py      from paths, globs and folders to sources

A new container is one subclass of `Source` with `@register_source`.
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
