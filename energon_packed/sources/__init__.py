"""Input files: one class per container format, tried in the order of `registry.SOURCES`.

jsonl.py         .jsonl .ndjson, read in place by byte ranges; .gz and .zst are decompressed once
json.py          .json, an array is rewritten once as JSONL
arrow.py         .arrow .feather, memory-mapped
parquet.py       .parquet, rewritten once as Arrow
csv.py           .csv, rewritten once as Arrow
hugging_face.py  save_to_disk folders
registry.py      from paths and globs to sources

A new container is one subclass of `Source` with `@register_source`.
"""

from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Row, Source
from energon_packed.sources.jsonl import JsonlSource
from energon_packed.sources.registry import known_formats, open_sources, register_source

__all__ = ["ArrowSource", "JsonlSource", "Row", "Source", "known_formats", "open_sources", "register_source"]
