"""Verify a packed dataset: a PackedFolder and its encoder in, one Check for each condition out.

check.py   Check: the result of a condition
files.py   tars, indexes and metadata files; loading the first sample of each split with Energon
packs.py   contents of the packs: samples, images, tokens and their sums
groups.py  groups of samples, and those of lengths.parquet
names.py   hashes of keys and ids, to compare millions of them
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np

from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.vision.families import ambiguous
from energon_packed.errors import ConfigError
from energon_packed.files import DiskList
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify.check import Check
from energon_packed.inspection.verify.files import (
    NO_MANIFEST,
    check_tar,
    energon_loads,
    indexes_match,
    keys_are_unique,
    rejects_match,
    shards_match,
    tar_file_ids,
    utilization_is_at_least,
)
from energon_packed.inspection.verify.packs import JoinedContents, PackChecker, contents_checks
from energon_packed.pipeline.engine import LocalEngine, Progress

__all__ = ["NO_MANIFEST", "Check", "verify"]


def verify(
    folder: PackedFolder,
    encoder: ChatEncoder | None,
    *,
    not_encoded: str = "there is no encoder",
    min_utilization: float | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Iterator[Check]:
    """Run all checks, and yield each result when it is complete.

    Checks that cannot run, such as checks that need a missing packing.json, are yielded with `not_checked`.

    Args:
        folder: dataset.
        encoder: encoder of the dataset, to encode every sample again; None skips that. If its `factor` is ambiguous,
            only samples without images are encoded.
        not_encoded: why `encoder` is None, for the check of the encoded samples.
        min_utilization: minimum mean share of a row that tokens fill, 0 to 1.
        processes: number of tars read in parallel.
        progress: notified of every tar while the packs are read.

    Raises:
        ConfigError: `min_utilization` is set, but the dataset has no packing.json or stores single samples.
    """
    manifest = folder.manifest
    if min_utilization is not None and (manifest is None or manifest.algorithm == "none"):
        reason = "has no packing.json" if manifest is None else "stores single samples"
        raise ConfigError(f"{folder.path} {reason}, so it has no utilization. Omit `min_utilization`.")
    if encoder is not None and encoder.vision is not None and (layouts := encoder.vision.ambiguous_layouts):
        # `pack` needs only the factor to measure images; encoding needs the patch size.
        not_encoded = f"`factor` {ambiguous(layouts)}. Pass `patch_size`, `vision_family` or `processor`"
    progress = progress or Progress()
    engine = LocalEngine(processes)
    yield shards_match(folder)

    # Tars that packing.json does not list are a problem of the first check; their contents are not checked.
    entries = {shard.name: shard for shard in manifest.shards} if manifest else {}
    known = [tar for tar in folder.tars if not entries or tar.name in entries]
    intact = Check("tars are intact" + (", with the size and hash recorded" if manifest else ""))
    check_known = partial(check_tar, entries=entries, tar_file_ids=tar_file_ids(folder))
    tars, keys = [], DiskList(np.uint64)
    for tar in engine.run(check_known, known):
        tar.move(keys)
        tars.append(tar)
    # Processes finish in any order: results are sorted, so that the output does not depend on it.
    tars.sort(key=lambda tar: tar.path)
    for tar in tars:
        intact.add(tar.failed.get("intact"))
    intact.summary = f"{sum(tar.stat().st_size for tar in known):,} bytes"
    intact.not_checked = "" if known else "there is no tar"
    yield intact
    # Only intact tars are read further: the others would repeat the problem found above.
    is_intact = {tar.path.name for tar in tars if tar.keys is not None}
    read = [tar for tar in known if tar.name in is_intact]
    missing = max(len(known), len(entries)) - len(read)
    unread = f"{missing:,} tars are missing or damaged" if missing else "" if read else "there is no tar"
    yield indexes_match(folder, tars, unread)
    yield keys_are_unique(tars, keys.values, unread)
    del tars, keys, is_intact

    progress.start("packs", len(read), "tars")
    contents = JoinedContents()
    checker = PackChecker(folder.codec, encoder, manifest)
    with closing(engine.run(checker, read)) as results:
        for result in results:
            contents.add(result)
            progress.advance(1)
    progress.stop()
    yield from contents_checks(folder, checker, contents, unread, not_encoded)
    yield rejects_match(folder)
    if manifest is not None and min_utilization is not None:
        yield utilization_is_at_least(manifest, min_utilization)
    # Last, because it imports Energon and runs the generated sample_loader.py.
    yield energon_loads(folder)
