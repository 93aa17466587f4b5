"""What is in the packs: samples, images, tokens and their sums. Tars are read in parallel, and the results joined."""

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from energon_packed.encoding import ChatEncoder, EncodedSample
from energon_packed.encoding.vision.images import load_image
from energon_packed.errors import EnergonPackedError, Reject
from energon_packed.flavors import load_pack
from energon_packed.formats import Codec, StoredSample
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify.check import Check
from energon_packed.loading.process import checked_sample
from energon_packed.pipeline.chunks import PACKED, TRUNCATED
from energon_packed.records import Conversation
from energon_packed.seqlens import round_up
from energon_packed.shards import PackingManifest
from energon_packed.shards.scan import TarScan


@dataclass(slots=True)
class TarContents:
    """What one tar holds.

    Attributes:
        name: file name of the tar.
        counts: packs, samples, images and tokens; supervised tokens of the samples that were encoded.
        samples: (id, checksum of its text or tokens, key of its pack) of every sample, in order.
        shortest: tokens of the two shortest samples that may share a row, by kind.
        packs, images, fit, encoded: checks of this tar.
    """

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[str, int, str]] = field(default_factory=list)
    shortest: dict[str, list[int]] = field(default_factory=dict)
    packs: Check = field(default_factory=lambda: Check("packs are of the flavor"))
    images: Check = field(default_factory=lambda: Check("images decode"))
    fit: Check = field(default_factory=lambda: Check("packs fit seq_len"))
    encoded: Check = field(
        default_factory=lambda: Check("samples encode to their recorded length, with a supervised token")
    )


@dataclass(frozen=True, slots=True)
class PackChecker:
    """Checks every pack of one tar: a function for an engine.

    Attributes:
        codec: of the flavor.
        encoder: encodes every sample again; None skips that.
        manifest: of the dataset; None where another tool packed it.
    """

    codec: Codec
    encoder: ChatEncoder | None
    manifest: PackingManifest | None

    def __call__(self, scan: TarScan) -> TarContents:
        """Check an intact tar."""
        with _one_thread():
            return self._check(scan)

    def _check(self, scan: TarScan) -> TarContents:
        here = TarContents(scan.path.name)
        for raw in scan.packs():
            key = raw["__key__"]
            try:
                load_pack(self.codec, raw)  # what the loader does
                samples = self.codec.read(raw)
            except (EnergonPackedError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                here.packs.fail(f"{here.name}: {key}: {error}")
                continue
            here.counts["packs"] += 1
            here.counts["samples"] += len(samples)
            here.counts["images"] += sum(len(one.images) for one in samples)
            here.samples += [(str(one.conversation.id), _checksum(one.conversation), key) for one in samples]
            self._check_pack(here, key, samples)
        return here

    def _check_pack(self, here: TarContents, key: str, samples: list[StoredSample]) -> None:
        where = f"{here.name}: {key}"
        for one in samples:
            for image in one.conversation.images:
                try:
                    load_image(image)
                except EnergonPackedError as error:
                    here.images.fail(f"{where}, sample {one.conversation.id}: {error}")
        encoded: list[EncodedSample | Reject | None] = [None] * len(samples)
        if self.encoder is not None:
            encoded = [*self.encoder.encode_many([one.conversation for one in samples])]
        lengths = [self._length(here, key, *pair) for pair in zip(samples, encoded, strict=True)]
        known = np.array([length for length in lengths if length > 0], dtype=np.int64)
        here.counts["tokens"] += int(known.sum())
        if self.manifest is None:
            return
        taken = round_up(known, self.manifest.pad_multiple)
        if taken.sum() > self.manifest.seq_len:
            here.fit.fail(f"{where} has {taken.sum()} tokens, more than seq_len {self.manifest.seq_len}")
        for one, length in zip(samples, taken.tolist(), strict=False):
            kind = one.conversation.kind if self.manifest.group_by == "media" else "any"
            here.shortest[kind] = sorted([*here.shortest.get(kind, []), length])[:2]

    def _length(
        self, here: TarContents, key: str, sample: StoredSample, encoded: EncodedSample | Reject | None
    ) -> int:
        """Tokens of a sample: as encoded again, else as recorded, else -1."""
        recorded = -1 if sample.length is None else sample.length
        if encoded is None:
            return recorded
        where = f"{here.name}: {key}, sample {sample.conversation.id}"
        try:
            one = checked_sample(sample, encoded, key, check_lengths=False)
        except EnergonPackedError as error:
            here.encoded.fail(f"{where}: {error}")
            return recorded
        if recorded >= 0 and len(one) != recorded:
            here.encoded.fail(f"{where} has {len(one)} tokens, recorded are {recorded}")
        if one.num_supervised == 0:
            here.encoded.fail(f"{where} has no supervised token")
        here.counts["supervised tokens"] += one.num_supervised
        return len(one)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on this thread alone: its thread pool does not survive a fork, and each core has a process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def contents_checks(folder: PackedFolder, contents: list[TarContents], *, fast: bool) -> Iterator[Check]:
    """The checks of all tars together.

    Args:
        folder: the dataset.
        contents: of its intact tars, by name.
        fast: samples were not encoded again.
    """
    manifest = folder.manifest
    total = sum((one.counts for one in contents), Counter[str]())
    joined = TarContents("")
    joined.packs.name = f"packs are {folder.codec.sample_class}"
    found = {
        "packs": f"{total['packs']:,} packs",
        "images": f"{total['images']:,} images",
        "fit": f"{manifest.seq_len:,} tokens" if manifest else "",
        "encoded": f"{total['samples']:,} samples",
    }
    for name, looked_at in found.items():
        check: Check = getattr(joined, name)
        check.found = looked_at
        for one in contents:
            check.add(getattr(one, name))
    if manifest is not None and (manifest.images_decoded or 0) < manifest.images:
        joined.images.remedy = "check-images"  # the tar is intact: the image was packed like this
    yield joined.packs
    if manifest is not None:
        yield _every_sample_once(folder, contents)
    yield joined.images
    if manifest is not None:
        yield joined.fit
    if fast:
        joined.encoded.name += ": skipped"
        joined.encoded.found = "--fast" if manifest else "--fast, or no packing.json and no --tokenizer"
    yield joined.encoded
    if manifest is None:
        return
    yield _sums(manifest, contents, total, encoded=not fast)
    if folder.codec.packed and len(contents) == len(manifest.shards):
        yield _samples_share_rows(folder.codec, manifest, contents, total)


def _samples_share_rows(
    codec: Codec, manifest: PackingManifest, contents: list[TarContents], total: Counter[str]
) -> Check:
    """Packs hold more than one sample, where any two would fit a row."""
    check = Check("samples share rows", found=f"{total['samples'] / max(total['packs'], 1):.2f} samples a pack")
    in_order = manifest.algorithm not in ("bfd", "ffd")
    unknown_kinds = manifest.group_by == "media" and codec.stores_tokens
    if total["samples"] > total["packs"] or in_order or unknown_kinds or manifest.max_samples_per_pack == 1:
        return check
    for kind in {kind for one in contents for kind in one.shortest}:
        shortest = sorted(length for one in contents for length in one.shortest.get(kind, []))[:2]
        if len(shortest) == 2 and sum(shortest) <= manifest.seq_len:
            check.fail(
                f"{total['samples']:,} samples in {total['packs']:,} packs: nothing was packed, and two of "
                f"{shortest[0]} and {shortest[1]} tokens would fit a row of {manifest.seq_len}"
            )
            return check
    check.found += f", as no two fit a row of {manifest.seq_len:,}"
    return check


def _every_sample_once(folder: PackedFolder, contents: list[TarContents]) -> Check:
    """The samples in the packs are those of lengths.parquet, each the same number of times.

    Two records of the input may have one id. Without lengths.parquet, one id with one text is the same sample twice.
    """
    check = Check("every sample is packed exactly once")
    recorded = _recorded_ids(folder)
    seen: dict[str, str] = {}
    times: Counter[str] = Counter()
    texts: Counter[tuple[str, int]] = Counter()
    for one in contents:
        for ident, text, key in one.samples:
            times[ident] += 1
            where = f"{one.name}: {key}"
            is_twice = texts[ident, text] > 0 if recorded is None else times[ident] > recorded[ident] > 0
            texts[ident, text] += 1
            if recorded is not None and not recorded[ident]:
                check.fail(f"sample {ident} is in {where}, but lengths.parquet does not list it as packed")
            elif is_twice:
                check.fail(f"sample {ident} is in {seen[ident]} and in {where}")
            seen[ident] = where
    for ident, count in (recorded or {}).items():
        if times[ident] < count:
            check.fail(f"sample {ident} is listed as packed in lengths.parquet, but is in no intact tar")
    check.found = f"{times.total():,} samples"
    if recorded is None:
        check.found += "; there is no lengths.parquet"
    return check


def _checksum(conversation: Conversation) -> int:
    if conversation.input_ids is not None:
        return zlib.crc32(conversation.input_ids.tobytes())
    texts = [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]
    return zlib.crc32("\0".join(texts).encode(errors="replace"))


def _sums(manifest: PackingManifest, contents: list[TarContents], total: Counter[str], *, encoded: bool) -> Check:
    check = Check("sums match packing.json", found=f"{total['tokens']:,} tokens")
    entries: dict[str, Any] = {shard.name: shard for shard in manifest.shards}
    for one in contents:
        for name in ("packs", "samples", "tokens"):
            recorded = getattr(entries[one.name], name)
            if one.counts[name] != recorded:
                check.fail(f"{one.name} has {one.counts[name]} {name}, packing.json says {recorded}")
    totals = {
        "packs": manifest.packs,
        "samples": manifest.packed,
        "tokens": manifest.tokens,
        "images": manifest.images,
    }
    if encoded and manifest.supervised_tokens is not None:
        totals["supervised tokens"] = manifest.supervised_tokens
    for name, recorded in totals.items():
        if total[name] != recorded:
            check.fail(f"the tars have {total[name]:,} {name}, packing.json says {recorded:,}")
    used = manifest.tokens / max(manifest.packs * manifest.seq_len, 1)
    if abs(used - manifest.utilization) > 1e-5:
        check.fail(f"packing.json has utilization {manifest.utilization}; tokens over packs x seq_len are {used:.6f}")
    return check


def _recorded_ids(folder: PackedFolder) -> Counter[str] | None:
    """How many packed records have each id by lengths.parquet: two of the input may have the same.

    None where there is no such file.
    """
    try:
        table = pq.read_table(folder.path.parent / "lengths.parquet", columns=["id", "status"])
    except (OSError, pa.ArrowInvalid):
        return None
    pairs = zip(table["id"].to_pylist(), table["status"].to_pylist(), strict=True)
    return Counter(ident for ident, status in pairs if status in (PACKED, TRUNCATED))
