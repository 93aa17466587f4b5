"""`verify`: is a data set whole, consistent with its own records, and what training will accept?"""

import hashlib
import json
import sqlite3
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from energon_packed.dataflow.cookers import FLAVORS
from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.images import load_image
from energon_packed.errors import EnergonPackedError, FormatError
from energon_packed.flavors import PackSample
from energon_packed.inspection.folder import PackedFolder, packs_of
from energon_packed.seqlens import round_up
from energon_packed.shards.layouts import layout_for
from energon_packed.shards.nv_meta import NV_META
from energon_packed.shards.scan import TarScan, scan_tar
from energon_packed.shards.split import shard_names

_MOST = 5  # problems told of each check


@dataclass(slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what should hold.
        problems: where it does not, with the file; the first five, then their number.
        found: how much was looked at.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    found: str = ""
    count: int = 0

    def fail(self, problem: str) -> None:
        """Note a problem."""
        self.count += 1
        if self.count <= _MOST:
            self.problems.append(problem)

    @property
    def holds(self) -> bool:
        """No problem was found."""
        return self.count == 0


def verify(folder: PackedFolder, encoder: ChatEncoder | None) -> Iterator[Check]:
    """Check after check, as they are done.

    Args:
        folder: the data set.
        encoder: the one that it was packed with, to encode every sample again; None skips that.
    """
    yield _shards_are_those_named(folder)
    whole, scans = _tars_are_whole(folder)
    yield whole
    yield _indexes_match(folder, scans)
    yield _keys(scans)
    contents = _Contents(folder, encoder)
    for scan in scans:
        contents.read(scan)
    yield from contents.checks()
    yield _ledger(folder)
    yield _energon_loads(folder)


def _shards_are_those_named(folder: PackedFolder) -> Check:
    check = Check("shards are those of packing.json and split.yaml", found=f"{len(folder.tars):,} tars")
    named = {shard.name: shard.split for shard in folder.manifest.shards}
    there = {tar.name for tar in folder.tars}
    for name in sorted(set(named) - there):
        check.fail(f"{name} is missing")
    for name in sorted(there - set(named)):
        check.fail(f"{name} is not in packing.json; was it added?")
    try:
        splits = {name: split for split, names in shard_names(folder.path).items() for name in names}
        for name in sorted(set(named) | set(splits)):
            if splits.get(name) != named.get(name):
                check.fail(f"split.yaml has {name} in {splits.get(name)}, packing.json in {named.get(name)}")
    except FormatError as error:
        check.fail(str(error))
    return check


def _tars_are_whole(folder: PackedFolder) -> tuple[Check, list[TarScan]]:
    check = Check("tars are whole, with the size and hash recorded")
    entries = {shard.name: shard for shard in folder.manifest.shards}
    sound = []
    size = 0
    for tar in folder.tars:
        entry = entries.get(tar.name)
        if entry is None:
            continue
        size += tar.stat().st_size
        with tar.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if tar.stat().st_size != entry.bytes:
            check.fail(f"{tar.name} has {tar.stat().st_size} bytes, packing.json says {entry.bytes}")
        elif digest != entry.sha256:
            check.fail(f"{tar.name} has sha256 {digest[:12]}.., packing.json says {entry.sha256[:12]}..")
        try:
            scan = scan_tar(tar)
        except FormatError as error:
            check.fail(str(error))
            continue
        for problem in scan.problems:
            check.fail(f"{tar.name}: {problem}")
        if not scan.problems:
            sound.append(scan)
    check.found = f"{size:,} bytes"
    return check, sound


def _indexes_match(folder: PackedFolder, scans: list[TarScan]) -> Check:
    check = Check(".tar.idx, index.sqlite and .info.json match the members")
    meta = folder.path / NV_META
    rows = {scan.path.name: scan.rows() for scan in scans}
    for scan in scans:
        index = scan.path.with_suffix(".tar.idx")
        expected = np.array(rows[scan.path.name].offsets, dtype="<u8").tobytes()
        if not index.is_file():
            check.fail(f"{index.name} is missing")
        elif index.read_bytes() != expected:
            check.fail(f"{index.name} does not match {scan.path.name}")
    try:
        counts = json.loads((meta / ".info.json").read_bytes())["shard_counts"]
        for name, shard in rows.items():
            if counts.get(name) != len(shard.keys):
                check.fail(f".info.json counts {counts.get(name)} packs in {name}, which has {len(shard.keys)}")
    except (OSError, ValueError, KeyError) as error:
        check.fail(f".info.json cannot be read: {type(error).__name__} {error}")
    database = meta / "index.sqlite"
    if not database.is_file():
        check.fail("index.sqlite is missing")
        return check
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        total = 0
        for number, entry in enumerate(folder.manifest.shards):
            if entry.name not in rows:
                continue
            _compare_rows(check, connection, number, rows[entry.name])
            total += len(rows[entry.name].keys)
        check.found = f"{total:,} packs"
    except sqlite3.Error as error:
        check.fail(f"index.sqlite cannot be read: {error}")
    finally:
        connection.close()
    return check


def _compare_rows(check: Check, connection: sqlite3.Connection, number: int, rows: Any) -> None:
    """The index rows of one tar against its headers."""
    sizes = np.diff(rows.offsets).tolist()
    expected = [
        (key, place, offset, size)
        for place, (key, offset, size) in enumerate(zip(rows.keys, rows.offsets, sizes, strict=False))
    ]
    query = "SELECT sample_key, sample_index, byte_offset, byte_size FROM samples WHERE tar_file_id = ? ORDER BY 2"
    _compare(check, rows.name, "samples", expected, connection.execute(query, (number,)).fetchall())
    query = (
        "SELECT sample_index, part_name, content_byte_offset, content_byte_size FROM sample_parts "
        "WHERE tar_file_id = ? ORDER BY 1, 3"
    )
    _compare(check, rows.name, "sample_parts", sorted(rows.parts, key=lambda p: (p[0], p[2])),
             connection.execute(query, (number,)).fetchall())  # fmt: skip


def _compare(check: Check, tar: str, table: str, expected: list[Any], found: list[Any]) -> None:
    if len(expected) != len(found):
        check.fail(f"index.sqlite has {len(found)} rows of {tar} in {table}, the tar has {len(expected)}")
        return
    for want, have in zip(expected, found, strict=True):
        if tuple(want) != tuple(have):
            check.fail(f"index.sqlite, {table} of {tar}: the row {tuple(have)} should be {tuple(want)}")
            return


def _keys(scans: list[TarScan]) -> Check:
    check = Check("keys are unique in the data set")
    owner: dict[str, str] = {}
    for scan in scans:
        for key in scan.rows().keys:
            if key in owner:
                check.fail(f"key {key} is in {owner[key]} and in {scan.path.name}")
            owner[key] = scan.path.name
    check.found = f"{len(owner):,} keys"
    return check


class _Contents:
    """Everything that needs the packs themselves, read once."""

    def __init__(self, folder: PackedFolder, encoder: ChatEncoder | None) -> None:
        self.folder = folder
        self.encoder = encoder
        self.flavor, self.load = FLAVORS[folder.manifest.sample_class]
        self.packs = Check(f"packs are {folder.manifest.sample_class}")
        self.once = Check("every sample is there once")
        self.images = Check("images decode")
        self.fit = Check("packs fit seq_len")
        self.encoded = Check("samples encode to their recorded length, with a supervised token")
        self.sums = Check("sums match packing.json")
        self.many = Check("packs hold more than one sample on average")
        self.total: Counter[str] = Counter()
        self.seen: dict[str, str] = {}
        self.times: Counter[str] = Counter()
        self.recorded = _recorded_ids(folder)

    def read(self, scan: TarScan) -> None:
        """Look at every pack of one tar."""
        entry = next(shard for shard in self.folder.manifest.shards if shard.name == scan.path.name)
        here: Counter[str] = Counter()
        for raw in packs_of(scan):
            where = f"{scan.path.name}: {raw['__key__']}"
            try:
                sample = self.flavor(__key__=raw["__key__"], __restore_key__=(), __subflavors__={}, **self.load(raw))
                conversations = sample.conversations()
            except (EnergonPackedError, KeyError, TypeError, ValueError) as error:
                self.packs.fail(f"{where}: {error}")
                continue
            here["packs"] += 1
            here["samples"] += len(conversations)
            here["images"] += sum(len(c.images) for c in conversations)
            self._read_pack(sample, conversations, where, here)
        for name, recorded in (("packs", entry.packs), ("samples", entry.samples), ("tokens", entry.tokens)):
            if here[name] != recorded:
                self.sums.fail(f"{entry.name} has {here[name]} {name}, packing.json says {recorded}")
        self.total += here

    def _read_pack(self, sample: PackSample, conversations: Any, where: str, here: Counter[str]) -> None:
        manifest = self.folder.manifest
        lengths = [-1 if length is None else length for length in sample.expected_lengths()]
        for conversation in conversations:
            name = str(conversation.id)
            self.times[name] += 1
            # Two records of the input may have one id: lengths.parquet says so.
            if self.times[name] > max(1, self.recorded[name]):
                self.once.fail(f"sample {name} is in {self.seen[name]} and in {where}")
            self.seen[name] = where
            for image in conversation.images:
                try:
                    load_image(image)
                except EnergonPackedError as error:
                    self.images.fail(f"{where}, sample {name}: {error}")
        if self.encoder is not None:
            lengths = [self._encode(c, n, sample, where) for c, n in zip(conversations, lengths, strict=True)]
        known = np.array([length for length in lengths if length > 0], dtype=np.int64)
        here["tokens"] += int(known.sum())
        row = int(round_up(known, manifest.pad_multiple).sum())
        if row > manifest.seq_len:
            self.fit.fail(f"{where} has {row} tokens, more than seq_len {manifest.seq_len}")

    def _encode(self, conversation: Any, recorded: int, sample: PackSample, where: str) -> int:
        assert self.encoder is not None
        limit = sample.truncate_to()
        try:
            one = self.encoder.encode(conversation)
            one = one if limit is None else one.truncated(limit)
        except EnergonPackedError as error:
            self.encoded.fail(f"{where}, sample {conversation.id}: {error}")
            return recorded
        if len(one) != recorded:
            self.encoded.fail(f"{where}, sample {conversation.id} has {len(one)} tokens, recorded are {recorded}")
        if one.num_supervised == 0:
            self.encoded.fail(f"{where}, sample {conversation.id} has no supervised token")
        return len(one)

    def checks(self) -> Iterator[Check]:
        """The checks, once every tar is read."""
        manifest, total = self.folder.manifest, self.total
        for name, recorded in (
            ("packs", manifest.packs),
            ("samples", manifest.packed),
            ("tokens", manifest.tokens),
            ("images", manifest.images),
        ):
            if total[name] != recorded:
                self.sums.fail(f"the tars have {total[name]:,} {name}, packing.json says {recorded:,}")
        if layout_for(manifest.sample_class).packed and total["samples"] <= total["packs"]:
            self.many.fail(
                f"{total['samples']:,} samples in {total['packs']:,} packs: nothing was packed; is seq_len "
                f"{manifest.seq_len} too short for this data?"
            )
        self.packs.found = f"{total['packs']:,} packs"
        self.once.found = f"{sum(self.times.values()):,} samples"
        self.images.found = f"{total['images']:,} images"
        self.fit.found = f"{manifest.seq_len:,} tokens"
        self.encoded.found = f"{total['samples']:,} samples" if self.encoder else "skipped: --fast"
        self.sums.found = f"{total['tokens']:,} tokens"
        self.many.found = f"{total['samples'] / max(total['packs'], 1):.2f} samples"
        yield from (self.packs, self.once, self.images, self.fit, self.encoded, self.sums, self.many)


def _recorded_ids(folder: PackedFolder) -> Counter[str]:
    """How many packed records have each id, as lengths.parquet says; empty where it is not here."""
    file = folder.path.parent / "lengths.parquet"
    try:
        table = pq.read_table(file, columns=["id", "status"])
    except (OSError, pa.ArrowInvalid):
        return Counter()
    pairs = zip(table["id"].to_pylist(), table["status"].to_pylist(), strict=True)
    return Counter(ident for ident, status in pairs if status == "packed")


def _ledger(folder: PackedFolder) -> Check:
    check = Check("records = packed + rejected, and rejects.jsonl agrees")
    manifest = folder.manifest
    rejected = sum(manifest.rejects.values())
    check.found = f"{manifest.records:,} records"
    if manifest.records != manifest.packed + rejected:
        check.fail(f"packing.json: {manifest.records} records are not {manifest.packed} packed + {rejected} rejected")
    file = folder.path.parent / "rejects.jsonl"
    if not file.is_file():
        check.found += "; rejects.jsonl is not here"
        return check
    try:
        reasons = Counter(orjson.loads(line)["reason"] for line in file.read_bytes().splitlines())
    except (ValueError, KeyError) as error:
        check.fail(f"rejects.jsonl cannot be read: {error}")
        return check
    for reason in sorted(set(reasons) | set(manifest.rejects)):
        if reasons[reason] != manifest.rejects.get(reason, 0):
            recorded = manifest.rejects.get(reason, 0)
            check.fail(f"rejects.jsonl has {reasons[reason]} records with {reason}, packing.json says {recorded}")
    return check


def _energon_loads(folder: PackedFolder) -> Check:
    """The first sample of every split, through Energon itself."""
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset

    check = Check("Energon loads it")

    class Nothing(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None

    def refuse(error: Exception, *rest: Any) -> None:
        raise error

    splits = sorted({shard.split for shard in folder.manifest.shards})
    check.found = ", ".join(splits)
    for split in splits:
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=refuse)
        try:
            dataset = get_val_dataset(
                folder.path, split_part=split, worker_config=config, batch_size=None, task_encoder=Nothing()
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on pinned memory, where there is no GPU
                next(iter(get_loader(dataset)))
        except (Exception, StopIteration) as error:  # Energon raises what its parts raise
            check.fail(f"split {split}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return check
