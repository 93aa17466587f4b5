"""A dataset with references to images in, the same dataset with the images in its tars out: `materialize`.

The new dataset equals the dataset of `pack --media copy`, byte for byte: only packing.json counts another run. Every
digest is compared while the images are copied.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import orjson

from energon_packed.errors import ConfigError
from energon_packed.files import atomic_path, atomic_write
from energon_packed.formats import codec_for
from energon_packed.formats.references import MEDIA_PART, complete_parts, moved_folders
from energon_packed.metadatasets import read_split
from energon_packed.options import refuse_remote
from energon_packed.pipeline.engine import LocalEngine, Progress
from energon_packed.shards import PackingManifest
from energon_packed.shards.index import write_tar_index
from energon_packed.shards.nv_meta import dataset_folder, write_nv_meta
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.tar import ShardRows, ShardSummary, TarShardWriter
from energon_packed.storage import as_path, is_remote

_REPORTS = ("lengths.parquet", "rejects.jsonl")


def _copy_shard(target: Path, rows: Path, media_root: Mapping[str, str] | None, tar: Path) -> ShardSummary:
    """Write a tar with the images of its packs, its index, and its index rows in the folder `rows`."""
    reader = ShardReader([tar], media_root=media_root)
    with TarShardWriter(target / tar.name, rows) as shard:
        for pack in range(len(reader)):
            raw = reader[pack]
            parts = complete_parts(raw) if MEDIA_PART in raw else raw
            members = [(name, content) for name, content in parts.items() if not name.startswith("__")]
            shard.add(raw["__key__"], members)
    write_tar_index(shard.path, shard.rows)
    atomic_write(rows / f"{tar.name}.json", orjson.dumps(shard.rows.as_dict()))
    return shard.rows.summary


def materialize(
    path: str | Path,
    output_dir: str | Path,
    *,
    media_root: Mapping[str, str] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> PackingManifest:
    """Write a dataset with references to images as a dataset with the images in its tars.

    The folder appears when it is complete; in an object store, packing.json does.

    Args:
        path: the dataset.
        output_dir: new or empty folder.
        media_root: folders of images that moved, new folder by old folder.
        workers: number of processes.
        progress: notified of every tar.

    Raises:
        ConfigError: the dataset has no references, or `output_dir` is not empty.
        FormatError: `path` is not a dataset, or is damaged.
        DataChangedError: a referenced image changed, or is missing.
        ResourceError: the disk is full, or fails.
    """
    source, output = dataset_folder(path), as_path(output_dir)
    refuse_remote(output, "output_dir", or_object=True)
    manifest = PackingManifest.load(source)
    if manifest.media != "reference":
        raise ConfigError(
            f"{source} must be a dataset of pack --media reference, got --media {manifest.media}: its tars contain "
            "the images. Use it as it is, or copy the folder."
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"`output_dir` must be a new or empty folder, got {output}.")
    moved_folders(media_root)  # raises before anything is written
    tars = [source / shard.name for shard in manifest.shards]
    progress = progress or Progress()
    is_inside = not is_remote(output) and output.exists()  # an empty folder may be a mount, which cannot be replaced
    parent = None if is_remote(output) else output if is_inside else output.absolute().parent
    if parent:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=parent) as temporary:
        root = output if is_remote(output) else Path(temporary, "out")
        shards, rows = root / "webdataset", Path(temporary, "rows")
        shards.mkdir(parents=True)
        rows.mkdir()
        progress.start("write", len(tars), "tars")
        done: dict[str, ShardSummary] = {}
        copy_shard = partial(_copy_shard, shards, rows, media_root)
        with closing(LocalEngine(workers).run(copy_shard, tars)) as summaries:
            for summary in summaries:
                done[summary.name] = summary
                progress.advance(1)
        progress.stop()
        for name in _REPORTS:
            if (source.parent / name).is_file():
                with (
                    (source.parent / name).open("rb") as report,
                    atomic_path(root / name) as copy,
                    copy.open("wb") as out,
                ):
                    shutil.copyfileobj(report, out)
        copied = _write_index(source, shards, rows, manifest, [done[tar.name] for tar in tars])
        if is_inside:
            for name in sorted(os.listdir(root)):  # `webdataset` is the last
                (root / name).rename(output / name)
        elif root is not output:
            root.rename(output)
    return copied


def _write_index(
    source: Path, shards: Path, rows: Path, manifest: PackingManifest, summaries: list[ShardSummary]
) -> PackingManifest:
    """Write `.nv-meta` of the new tars."""
    split = read_split(source)
    write_nv_meta(
        shards,
        codec=codec_for(manifest.sample_class),
        shards=summaries,
        rows=(ShardRows.from_dict(orjson.loads((rows / f"{s.name}.json").read_bytes())) for s in summaries),
        splits=split.parts,
        exclude=split.exclude_patterns,
        dataset_module=manifest.dataset_module,
    )
    entries = [
        replace(entry, bytes=summary.size, sha256=summary.sha256)
        for entry, summary in zip(manifest.shards, summaries, strict=True)
    ]
    copied = replace(manifest, media="copy", media_check="digest", media_stored={}, shards=entries)
    copied.save(shards)
    return copied
