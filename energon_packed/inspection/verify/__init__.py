"""`verify`: is a dataset intact, consistent with its own records, and accepted by training?

files.py    the tars, their indexes, the files that name them
packs.py    what is in the packs
energon.py  whether Energon loads it
"""

from collections.abc import Iterator
from contextlib import closing

from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify.check import Check
from energon_packed.inspection.verify.files import (
    TarChecker,
    energon_loads,
    indexes_match,
    keys_are_unique,
    ledger_agrees,
    shards_are_those_named,
    utilization_is_at_least,
)
from energon_packed.inspection.verify.packs import PackChecker, contents_checks
from energon_packed.pipeline.engine import LocalEngine, Progress

__all__ = ["Check", "verify"]


def verify(
    folder: PackedFolder,
    encoder: ChatEncoder | None,
    *,
    min_utilization: float | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Iterator[Check]:
    """Check after check, as they are done. Without a packing.json, those that need it are skipped.

    Args:
        folder: the dataset.
        encoder: the one that it was packed with, to encode every sample again; None skips that.
        min_utilization: smallest share of a row that tokens must fill on average, 0 to 1.
        processes: tars read in parallel.
        progress: notified of every tar while the packs are read.

    Raises:
        ConfigError: `min_utilization` for data that has none.
    """
    manifest = folder.manifest
    if min_utilization is not None and (manifest is None or manifest.algorithm == "none"):
        what = "has no packing.json" if manifest is None else "holds single samples"
        raise ConfigError(f"{folder.path} {what}, so it has no utilization; omit `min_utilization`")
    progress = progress or Progress()
    engine = LocalEngine(processes)
    yield shards_are_those_named(folder)

    entries = {shard.name: shard for shard in manifest.shards} if manifest else {}
    known = [tar for tar in folder.tars if not entries or tar.name in entries]
    intact = Check("tars are intact" + (", with the size and hash recorded" if manifest else ""))
    scans = []
    for _, check, scan in sorted(engine.run(TarChecker(entries), known), key=lambda result: result[0]):
        intact.add(check)
        scans += [scan] if scan is not None else []
    intact.found = f"{sum(tar.stat().st_size for tar in known):,} bytes"
    yield intact
    yield indexes_match(folder, scans)
    yield keys_are_unique(scans)

    progress.start("packs", len(scans), "tars")
    contents = []
    with closing(engine.run(PackChecker(folder.codec, encoder, manifest), scans)) as results:
        for one in results:
            contents.append(one)
            progress.advance(1)
    progress.stop()
    contents.sort(key=lambda one: one.name)
    yield from contents_checks(folder, contents, fast=encoder is None)
    if manifest is not None:
        yield ledger_agrees(folder, manifest)
    if min_utilization is not None:
        yield utilization_is_at_least(folder, min_utilization)
    yield energon_loads(folder)
