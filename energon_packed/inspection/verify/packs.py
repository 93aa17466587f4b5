"""Check the contents of the packs: the scans of intact tars in, Checks out.

PackChecker is a task for one tar: it decodes samples and images, encodes the samples again, and returns TarContents.
`contents_checks` joins the TarContents of all tars, and compares them with packing.json and lengths.parquet.
"""

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
from energon_packed.errors import EnergonPackedError, RecordError, Reject, ResourceError
from energon_packed.flavors import load_pack
from energon_packed.formats import Codec, StoredSample
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify.check import Check
from energon_packed.loading.process import checked_sample
from energon_packed.pipeline.chunks import FRAGMENT, PACKED, TRUNCATED
from energon_packed.records import Conversation
from energon_packed.seqlens import round_up
from energon_packed.shards import PackingManifest
from energon_packed.shards.scan import TarScan


@dataclass(slots=True)
class TarContents:
    """Contents of one tar.

    Attributes:
        name: file name of the tar.
        counts: number of packs, samples, images and tokens, and of supervised tokens of the encoded samples.
        samples: (id, checksum of its text or tokens, key of its pack) of every sample, in order.
        shortest: lengths of the two shortest samples that may share a row, by kind of media.
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
    """Task that checks every pack of a tar.

    Attributes:
        codec: codec of the flavor.
        encoder: encoder of the dataset, to encode every sample again; None skips that.
        manifest: content of packing.json; None if a third-party tool packed the dataset.
    """

    codec: Codec
    encoder: ChatEncoder | None
    manifest: PackingManifest | None

    def __call__(self, scan: TarScan) -> TarContents:
        """Check an intact tar."""
        contents = TarContents(scan.path.name)
        with _one_thread():
            for raw in scan.packs():
                key = raw["__key__"]
                try:
                    load_pack(self.codec, raw)  # the function that loaders call, which may refuse more than `read`
                    samples = self.codec.read(raw)
                except ResourceError:
                    raise
                # Decoders raise many types for malformed parts; one bad pack must not end the check.
                except (EnergonPackedError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                    contents.packs.fail(f"{contents.name}: {key}: {error}")
                    continue
                contents.counts["packs"] += 1
                contents.counts["samples"] += len(samples)
                contents.counts["images"] += sum(len(sample.images) for sample in samples)
                for sample in samples:
                    conversation = sample.conversation
                    contents.samples.append((str(conversation.id), _checksum(conversation), key))
                self._check_pack(contents, key, samples)
        return contents

    def _check_pack(self, contents: TarContents, key: str, samples: list[StoredSample]) -> None:
        pack = f"{contents.name}: {key}"
        for sample in samples:
            for image in sample.conversation.images:
                try:
                    load_image(image)
                except RecordError as error:
                    contents.images.fail(f"{pack}, sample {sample.conversation.id}: {error}")
        encoded: list[EncodedSample | Reject | None] = [None] * len(samples)
        if self.encoder is not None:
            encoded = [*self.encoder.encode_many([sample.conversation for sample in samples])]
        lengths = [self._length(contents, key, *pair) for pair in zip(samples, encoded, strict=True)]
        # -1: neither recorded nor encoded.
        known = np.array([length for length in lengths if length > 0], dtype=np.int64)
        contents.counts["tokens"] += int(known.sum())
        if self.manifest is None:
            return
        padded = round_up(known, self.manifest.pad_multiple)
        if padded.sum() > self.manifest.seq_len:
            contents.fit.fail(f"{pack} has {padded.sum()} tokens, more than seq_len {self.manifest.seq_len}")
        for sample, length in zip(samples, padded.tolist(), strict=False):
            # With --group-by media, only samples of the same kind share a row.
            kind = sample.conversation.kind if self.manifest.group_by == "media" else "any"
            contents.shortest[kind] = sorted([*contents.shortest.get(kind, []), length])[:2]

    def _length(
        self, contents: TarContents, key: str, sample: StoredSample, encoded: EncodedSample | Reject | None
    ) -> int:
        """Number of tokens of a sample: encoded, else recorded, else -1."""
        recorded = -1 if sample.length is None else sample.length
        if encoded is None:
            return recorded
        name = f"{contents.name}: {key}, sample {sample.conversation.id}"
        try:
            checked = checked_sample(sample, encoded, key, check_lengths=False)
        except EnergonPackedError as error:
            contents.encoded.fail(f"{name}: {error}")
            return recorded
        if recorded >= 0 and len(checked) != recorded:
            contents.encoded.fail(f"{name} has {len(checked)} tokens, {recorded} are recorded")
        if checked.num_supervised == 0:
            contents.encoded.fail(f"{name} has no supervised token")
        contents.counts["supervised tokens"] += checked.num_supervised
        return len(checked)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to this thread: its thread pool does not survive a fork, and each core already has a process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def contents_checks(folder: PackedFolder, contents: list[TarContents], *, fast: bool) -> Iterator[Check]:
    """Join the checks of all tars.

    Args:
        folder: dataset.
        contents: contents of its intact tars, sorted by name.
        fast: samples were not encoded again.
    """
    manifest = folder.manifest
    total = sum((tar.counts for tar in contents), Counter[str]())
    joined = TarContents("")
    joined.packs.name = f"packs are {folder.codec.sample_class}"
    summaries = {
        "packs": f"{total['packs']:,} packs",
        "images": f"{total['images']:,} images",
        "fit": f"{manifest.seq_len:,} tokens" if manifest else "",
        "encoded": f"{total['samples']:,} samples",
    }
    for name, summary in summaries.items():
        check: Check = getattr(joined, name)
        check.summary = summary
        for tar in contents:
            check.add(getattr(tar, name))
    # Not every image was decoded while packing, so a bad image in an intact tar was bad in the input.
    if manifest is not None and (manifest.images_decoded or 0) < manifest.images:
        joined.images.remedy = "check-images"
    yield joined.packs
    if manifest is not None:
        yield _every_sample_once(folder, contents)
    yield joined.images
    if manifest is not None:
        yield joined.fit
    if fast:
        joined.encoded.name += ": skipped"
        joined.encoded.summary = "--fast" if manifest else "--fast, or no packing.json and no --tokenizer"
    yield joined.encoded
    if manifest is None:
        return
    yield _sums(manifest, contents, total, encoded=not fast)
    if folder.codec.packed and len(contents) == len(manifest.shards):
        yield _samples_share_rows(folder.codec, manifest, contents, total)


def _samples_share_rows(
    codec: Codec, manifest: PackingManifest, contents: list[TarContents], total: Counter[str]
) -> Check:
    """Check that packs contain more than one sample, if two samples would fit a row."""
    check = Check("samples share rows", summary=f"{total['samples'] / max(total['packs'], 1):.2f} samples a pack")
    # Planners that keep the input order may leave two samples apart that would fit.
    in_order = manifest.algorithm not in ("bfd", "ffd")
    # The kind of media is unknown for flavors that store tokens.
    unknown_kinds = manifest.group_by == "media" and codec.stores_tokens
    if total["samples"] > total["packs"] or in_order or unknown_kinds or manifest.max_samples_per_pack == 1:
        return check
    # If the two shortest samples of a kind do not fit one row together, no two samples do.
    for kind in {kind for tar in contents for kind in tar.shortest}:
        shortest = sorted(length for tar in contents for length in tar.shortest.get(kind, []))[:2]
        if len(shortest) == 2 and sum(shortest) <= manifest.seq_len:
            check.fail(
                f"{total['samples']:,} samples in {total['packs']:,} packs: nothing was packed, and two of "
                f"{shortest[0]} and {shortest[1]} tokens would fit a row of {manifest.seq_len}"
            )
            return check
    check.summary += f", as no two fit a row of {manifest.seq_len:,}"
    return check


def _every_sample_once(folder: PackedFolder, contents: list[TarContents]) -> Check:
    """Check that each sample id is packed as often as lengths.parquet lists it as packed."""
    check = Check("every sample is packed exactly once")
    recorded = _recorded_ids(folder)
    packs: dict[str, str] = {}  # the last pack of each sample id
    times: Counter[str] = Counter()
    contents_seen: Counter[tuple[str, int]] = Counter()
    for tar in contents:
        for ident, checksum, key in tar.samples:
            times[ident] += 1
            pack = f"{tar.name}: {key}"
            # Records may share an id. Without lengths.parquet, only an equal id and an equal text are one sample.
            is_repeated = (
                contents_seen[ident, checksum] > 0 if recorded is None else times[ident] > recorded[ident] > 0
            )
            contents_seen[ident, checksum] += 1
            if recorded is not None and not recorded[ident]:
                check.fail(f"sample {ident} is in {pack}, but lengths.parquet does not list it as packed")
            elif is_repeated:
                check.fail(f"sample {ident} is in {packs[ident]} and in {pack}")
            packs[ident] = pack
    for ident, count in (recorded or {}).items():
        if times[ident] < count:
            check.fail(f"sample {ident} is listed as packed in lengths.parquet, but is in no intact tar")
    check.summary = f"{times.total():,} samples"
    if recorded is None:
        check.summary += "; there is no lengths.parquet"
    return check


def _checksum(conversation: Conversation) -> int:
    """CRC-32 of the tokens or the text: enough to distinguish samples with equal ids."""
    if conversation.input_ids is not None:
        return zlib.crc32(conversation.input_ids.tobytes())
    strings = [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]
    return zlib.crc32("\0".join(strings).encode(errors="replace"))


def _sums(manifest: PackingManifest, contents: list[TarContents], total: Counter[str], *, encoded: bool) -> Check:
    """Check that the counts of the packs match packing.json, for each shard and in total."""
    check = Check("sums match packing.json", summary=f"{total['tokens']:,} tokens")
    entries: dict[str, Any] = {shard.name: shard for shard in manifest.shards}
    for tar in contents:
        for name in ("packs", "samples", "tokens"):
            recorded = getattr(entries[tar.name], name)
            if tar.counts[name] != recorded:
                check.fail(f"{tar.name} has {tar.counts[name]} {name}, packing.json has {recorded}")
    # Totals are compared as well: a shard that is missing changes only them.
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
            check.fail(f"the tars have {total[name]:,} {name}, packing.json has {recorded:,}")
    actual = manifest.tokens / max(manifest.packs * manifest.seq_len, 1)
    if abs(actual - manifest.utilization) > 1e-5:  # it is stored with six decimals
        check.fail(
            f"packing.json has utilization {manifest.utilization}, but tokens / (packs * seq_len) is {actual:.6f}"
        )
    return check


def _recorded_ids(folder: PackedFolder) -> Counter[str] | None:
    """Count the packed records and fragments of each id in lengths.parquet; None without this file."""
    try:
        table = pq.read_table(folder.path.parent / "lengths.parquet", columns=["id", "status"])
    # The file is not needed for training, and may not be copied with the shards.
    except (OSError, pa.ArrowInvalid):
        return None
    pairs = zip(table["id"].to_pylist(), table["status"].to_pylist(), strict=True)
    return Counter(ident for ident, status in pairs if status in (PACKED, TRUNCATED, FRAGMENT))
