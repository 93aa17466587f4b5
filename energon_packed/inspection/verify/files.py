"""Check the files of a dataset without decoding packs: a PackedFolder and the scanned tars in, Checks out.

Tars are compared with packing.json and split.yaml, indexes and counts with the tar headers, and rejects.jsonl with the
counts. `energon_loads` loads the first sample of each split with Energon.
"""

import hashlib
import sqlite3
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from energon_packed.errors import EnergonPackedError, FormatError
from energon_packed.files import DiskList
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify.check import Check, FailedChecks
from energon_packed.inspection.verify.names import UInt64, joined, name_hashes
from energon_packed.libraries import NO_ENERGON, has_energon
from energon_packed.metadatasets import NV_META, read_split
from energon_packed.pipeline.output.run_reports import read_rejects
from energon_packed.shards import PackingManifest
from energon_packed.shards.counts import shard_counts
from energon_packed.shards.index import open_sqlite_index
from energon_packed.shards.manifest import ShardEntry
from energon_packed.shards.nv_meta import CRUDE, loader_files
from energon_packed.shards.scan import scan_tar
from energon_packed.shards.tar import ShardRows
from energon_packed.storage import energon_url

_DATABASE = "index.sqlite"
NO_MANIFEST = "there is no packing.json"  # why a check of its counts did not run


def shards_match(folder: PackedFolder) -> Check:
    """Check that the tars on disk match packing.json and split.yaml."""
    source = "split.yaml" if folder.manifest is None else "packing.json"
    sources = source if folder.manifest is None else "packing.json and split.yaml"
    check = Check(f"shards match {sources}", summary=f"{len(folder.tars):,} tars")
    if not folder.tars:
        check.fail("there is no tar, so nothing to check")
    try:
        if excluded := read_split(folder.path).exclude_patterns:
            check.summary += f"; split.yaml excludes {len(excluded):,} names, which Energon skips"
        # Both lists must match the files on disk, and each other.
        named = folder.shards
        there = {tar.name for tar in folder.tars}
        for name in sorted(set(named) - there):
            check.fail(f"{name} is missing")
        for name in sorted(there - set(named)):
            check.fail(f"{name} is on disk, but not in {source}")
        splits = folder.split_yaml_shards()
        for name in sorted(set(named) | set(splits)):
            if splits.get(name) != named.get(name):
                check.fail(f"split.yaml has {name} in {splits.get(name)}, packing.json in {named.get(name)}")
    except FormatError as error:
        check.fail(str(error))
    return check


@dataclass(slots=True)
class CheckedTar:
    """Result of `check_tar`.

    Attributes:
        path: the tar.
        failed: the checks that failed: `intact` of the tar, `index` of its `.tar.idx`, and `rows` of index.sqlite.
        unreadable: why index.sqlite cannot be read; "" if it was read.
        keys: hashes of the keys of its packs, in order, until `move` stores them; None if the tar is damaged.
        packs: place of its keys among the keys of all tars.
    """

    path: Path
    failed: FailedChecks = field(default_factory=FailedChecks)
    unreadable: str = ""
    keys: UInt64 | None = None
    packs: slice = field(default_factory=lambda: slice(0))

    def move(self, keys: DiskList) -> None:
        """Move the hashes of the keys to the end of those of other tars."""
        if self.keys is not None:
            self.packs = slice(len(keys), len(keys) + len(self.keys))
            keys.extend(self.keys)
            self.keys = np.zeros(0, np.uint64)


def check_tar(tar: Path, entries: Mapping[str, ShardEntry], tar_file_ids: Mapping[str, int]) -> CheckedTar:
    """Read a complete tar, and compare it with packing.json and the indexes.

    Args:
        tar: the tar.
        entries: the shards of packing.json, by name.
        tar_file_ids: `tar_file_id` of index.sqlite by name; empty without this file.
    """
    result = CheckedTar(tar)
    failed = result.failed
    if entry := entries.get(tar.name):
        size = tar.stat().st_size
        with tar.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if size != entry.bytes:
            failed.fail("intact", f"{tar.name} has {size} bytes, packing.json has {entry.bytes}")
        elif digest != entry.sha256:
            failed.fail("intact", f"{tar.name} has sha256 {digest[:12]}.., packing.json has {entry.sha256[:12]}..")
    # A wrong hash does not end the check: the headers show which members are damaged.
    try:
        scan = scan_tar(tar)
    except FormatError as error:
        failed.fail("intact", str(error))
        return result
    for problem in scan.problems:
        failed.fail("intact", f"{tar.name}: {problem}")
    if scan.problems:
        return result  # the rows of a damaged tar cannot be compared
    rows = scan.rows()
    result.keys = name_hashes(rows.keys)
    index = tar.with_suffix(".tar.idx")
    if not index.is_file():
        failed.fail("index", f"{index.name} is missing")
    elif index.read_bytes() != np.array(rows.offsets, dtype="<u8").tobytes():
        failed.fail("index", f"{index.name} does not match {tar.name}")
    if tar.name in tar_file_ids:
        try:
            with closing(open_sqlite_index(tar.parent / NV_META / _DATABASE)) as connection:
                _compare_rows(failed, connection, tar_file_ids[tar.name], rows)
        except (sqlite3.Error, UnicodeError) as error:
            result.unreadable = f"{_DATABASE} cannot be read: {error}"
    return result


def tar_file_ids(folder: PackedFolder) -> dict[str, int]:
    """Return the `tar_file_id` of each shard in index.sqlite; {} without this file.

    It is the index of the shard in packing.json, including shards without an intact tar.
    """
    names = folder.shards if (folder.path / NV_META / _DATABASE).is_file() else {}
    return {name: tar_file_id for tar_file_id, name in enumerate(names)}


def indexes_match(folder: PackedFolder, tars: Sequence[CheckedTar], unread: str) -> Check:
    """Check that the indexes of valid tars match their headers; `unread` names the other tars."""
    name = f".tar.idx, {_DATABASE} and .info.json match the members"
    check = Check(name, not_checked=unread, remedy="nv-meta")
    packs = {tar.path.name: tar.packs.stop - tar.packs.start for tar in tars if tar.keys is not None}
    for tar in tars:
        check.add(tar.failed.get("index"))
    try:
        counts = shard_counts(folder.path)
        for name, count in packs.items():
            if counts.get(name) != count:
                check.fail(f".info.json counts {counts.get(name)} packs in {name}, which has {count}")
    except FormatError as error:
        check.fail(str(error))
    if not (folder.path / NV_META / _DATABASE).is_file():
        check.fail(f"{_DATABASE} is missing")
        return check
    for tar in tars:
        check.add(tar.failed.get("rows"))
    if errors := [tar.unreadable for tar in tars if tar.unreadable]:
        check.fail(errors[0])
    else:
        check.summary = f"{sum(count for name, count in packs.items() if name in folder.shards):,} packs"
    return check


def _compare_rows(failed: FailedChecks, connection: sqlite3.Connection, tar_file_id: int, rows: ShardRows) -> None:
    """Compare the rows of a tar in index.sqlite with its headers."""
    sizes = np.diff(rows.offsets).tolist()
    expected = [
        (key, index, offset, size)
        for index, (key, offset, size) in enumerate(zip(rows.keys, rows.offsets, sizes, strict=False))
    ]
    query = "SELECT sample_key, sample_index, byte_offset, byte_size FROM samples WHERE tar_file_id = ? ORDER BY 2"
    _compare(failed, rows.name, "samples", expected, connection.execute(query, (tar_file_id,)).fetchall())
    query = (
        "SELECT sample_index, part_name, content_byte_offset, content_byte_size FROM sample_parts "
        "WHERE tar_file_id = ? ORDER BY 1, 3"
    )
    expected_parts = sorted(rows.parts, key=lambda part: (part[0], part[2]))  # sample index, offset: ORDER BY 1, 3
    _compare(failed, rows.name, "sample_parts", expected_parts, connection.execute(query, (tar_file_id,)).fetchall())


def _compare(failed: FailedChecks, tar: str, table: str, expected: Sequence[Any], actual: Sequence[Any]) -> None:
    if len(expected) != len(actual):
        failed.fail("rows", f"index.sqlite has {len(actual)} rows of {tar} in {table}, the tar has {len(expected)}")
        return
    for right, row in zip(expected, actual, strict=True):
        if tuple(right) != tuple(row):
            failed.fail("rows", f"index.sqlite, {table} of {tar}: the row {tuple(row)} should be {tuple(right)}")
            return  # one shifted row shifts all later rows


def keys_are_unique(tars: Sequence[CheckedTar], keys: UInt64, unread: str) -> Check:
    """Check that no two packs share a key.

    Args:
        tars: all tars.
        keys: hashes of their keys, uint64 (n,).
        unread: names the tars that are damaged.
    """
    check = Check("keys are unique in the dataset", not_checked=unread)
    shared = joined([keys]).repeated()
    owner: dict[str, str] = {}
    for tar in tars if len(shared) else ():
        is_of_others = np.isin(keys[tar.packs], shared)
        if not is_of_others.any():
            continue
        for key, is_shared in zip(scan_tar(tar.path).keys(), is_of_others.tolist(), strict=True):
            if is_shared and key in owner:
                check.fail(f"key {key} is in {owner[key]} and in {tar.path.name}")
            if is_shared:
                owner[key] = tar.path.name
    check.summary = f"{len(keys) - check.count:,} keys"
    return check


def rejects_match(folder: PackedFolder) -> Check:
    """Check that the counts in packing.json add up and match rejects.jsonl for each reason."""
    check = Check("records = packed + rejected, and rejects.jsonl matches")
    manifest = folder.manifest
    if manifest is None:
        check.not_checked = NO_MANIFEST
        return check
    rejected = sum(manifest.rejects.values())
    check.summary = f"{manifest.records:,} records"
    packed = manifest.packed - manifest.fragments + manifest.records_split
    if manifest.records != packed + rejected:
        check.fail(f"packing.json: {manifest.records} records != {packed} packed + {rejected} rejected")
    # Training does not need the file, so it may be missing after a copy of the shards.
    file = folder.path.parent / "rejects.jsonl"
    if not file.is_file():
        check.not_checked = "there is no rejects.jsonl"
        return check
    try:
        reasons = Counter(line["reason"] for line in read_rejects(file))
    except FormatError as error:
        check.fail(str(error))
        return check
    for reason in sorted(set(reasons) | set(manifest.rejects)):
        if reasons[reason] != manifest.rejects.get(reason, 0):
            recorded = manifest.rejects.get(reason, 0)
            check.fail(f"rejects.jsonl has {reasons[reason]} records with {reason}, packing.json has {recorded}")
    return check


def utilization_is_at_least(manifest: PackingManifest, minimum: float) -> Check:
    """Check that tokens fill at least this share of the rows, by the counts in packing.json."""
    check = Check(f"utilization is at least {minimum:.2%}", summary=f"{manifest.utilization:.2%}")
    if manifest.utilization < minimum:
        check.fail(
            f"{manifest.tokens:,} tokens in {manifest.packs:,} rows of {manifest.seq_len:,} are a utilization of "
            f"{manifest.utilization:.2%}. Pack more data at once, raise seq_len, or unset max_samples_per_pack."
        )
    return check


def energon_loads(folder: PackedFolder) -> Check:
    """Check that Energon loads the first sample of every split.

    Energon runs `sample_loader.py`, so it is called only if this file is exactly the generated file. If dataset.yaml
    names a class of another package, the dataset is loaded with crude.yaml instead.
    """
    check = Check("sample_loader.py is unmodified, and Energon loads the dataset", remedy="nv-meta")
    module = folder.manifest.dataset_module if folder.manifest else None
    for name, content in loader_files(folder.codec, module).items():
        file = folder.path / NV_META / name
        if not file.is_file():
            check.fail(f"{name} is missing. Run energon-packed nv-meta.")
        elif file.read_bytes() != content:
            check.fail(f"{name} differs from the generated file, so it was not executed. Review it, or run nv-meta.")
    if not has_energon():
        check.not_checked = NO_ENERGON
        return check

    from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset

    from energon_packed.loading.datasets.trust import check_trusted
    from energon_packed.loading.energon.faults import own_error
    from energon_packed.loading.energon.task_encoder import cook_pack

    try:
        # Energon imports code from these files; `check_trusted` looks for references to other code.
        check_trusted(folder.path, dataset_config=CRUDE if module is not None else None)
    except EnergonPackedError as error:
        check.fail(str(error))
    if not check.passed:
        return check

    class RawPacks(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None
        cookers = (Cooker(cook_pack),)  # for crude.yaml

    def reraise(error: Exception, *rest: Any) -> None:
        raise error  # by default, Energon logs the error and skips the sample

    try:
        # Splits without shards have no first sample.
        splits = sorted(set(folder.shards.values()))
        read_split(folder.path)
    except FormatError as error:
        check.fail(str(error))
        return check
    check.summary = ", ".join(splits) if module is None else f"{', '.join(splits)}, by crude.yaml, without {module}"
    for split in splits:
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=reraise)
        try:
            dataset = get_val_dataset(
                energon_url(folder.path),
                split_part=split,
                worker_config=config,
                batch_size=None,
                task_encoder=RawPacks(),
                dataset_config=None if module is None else CRUDE,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pinned memory without a GPU
                next(iter(get_loader(dataset, watchdog_timeout_seconds=None)))  # a watchdog thread would never end
        except Exception as error:  # Energon does not wrap the errors of its readers
            error = own_error(error) or error
            check.fail(f"split {split}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return check
