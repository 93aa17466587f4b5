"""Input files: one class per way of reading, one function per format.

.jsonl                              JsonlSource, read in place by byte ranges
.jsonl.gz  .jsonl.zst  .json        unpacked once into a JSONL file beside the restart state
.arrow  .feather  save_to_disk/     ArrowSource, memory-mapped
.parquet  .csv                      converted once into an Arrow file beside the restart state
"""

from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Row, Source
from energon_packed.sources.discovery import open_sources
from energon_packed.sources.jsonl import JsonlSource

__all__ = ["ArrowSource", "JsonlSource", "Row", "Source", "open_sources"]
