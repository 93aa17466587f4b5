"""What is in the packs: samples, images, tokens and their sums. Tars are read side by side, and the results joined."""

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

from energon_packed.build.chunks import PACKED, TRUNCATED
from energon_packed.conversation import Conversation
from energon_packed.dataflow.cookers import FLAVORS
from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.images import load_image
from energon_packed.errors import EnergonPackedError
from energon_packed.flavors import PackedTokensSample, PackSample
from energon_packed.inspection.folder import PackedFolder, packs_of
from energon_packed.inspection.verify.check import Check
from energon_packed.seqlens import round_up
from energon_packed.shards import PackingManifest
from energon_packed.shards.layouts import layout_for
from energon_packed.shards.scan import TarScan


@dataclass(slots=True)
class TarContents:
    """What one tar holds.

    Attributes:
        name: file name of the tar.
        counts: packs, samples, images and tokens.
        samples: (id, check sum of its text or tokens, key of its pack) of every sample, in order.
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
    """Looks at every pack of one tar: a function for an engine.

    Attributes:
        sample_class: flavor.
        encoder: encodes every sample again; None skips that.
        manifest: of the data set; None where another tool packed it.
    """

    sample_class: str
    encoder: ChatEncoder | None
    manifest: PackingManifest | None

    def __call__(self, scan: TarScan) -> TarContents:
        """Read a sound tar."""
        with _one_thread():
            return self._check(scan)

    def _check(self, scan: TarScan) -> TarContents:
        flavor, load = FLAVORS[self.sample_class]
        here = TarContents(scan.path.name)
        for raw in packs_of(scan):
            key = raw["__key__"]
            try:
                sample = flavor(__key__=key, __restore_key__=(), __subflavors__={}, **load(raw))
                conversations = sample.conversations()
            except (EnergonPackedError, KeyError, TypeError, ValueError) as error:
                here.packs.fail(f"{here.name}: {key}: {error}")
                continue
            here.counts["packs"] += 1
            here.counts["samples"] += len(conversations)
            here.counts["images"] += sum(len(c.images) for c in conversations)
            here.samples += [(str(one.id), _checksum(one), key) for one in conversations]
            self._check_pack(here, sample, conversations)
        return here

    def _check_pack(self, here: TarContents, sample: PackSample, conversations: list[Conversation]) -> None:
        where = f"{here.name}: {sample.__key__}"
        for conversation in conversations:
            for image in conversation.images:
                try:
                    load_image(image)
                except EnergonPackedError as error:
                    here.images.fail(f"{where}, sample {conversation.id}: {error}")
        lengths = [-1 if length is None else length for length in sample.expected_lengths()]
        if self.encoder is not None:
            limit = sample.truncate_to()
            pairs = zip(conversations, lengths, strict=True)
            lengths = [self._encoded_length(here, where, c, recorded, limit) for c, recorded in pairs]
        known = np.array([length for length in lengths if length > 0], dtype=np.int64)
        here.counts["tokens"] += int(known.sum())
        if self.manifest is None:
            return
        taken = round_up(known, self.manifest.pad_multiple)
        if taken.sum() > self.manifest.seq_len:
            here.fit.fail(f"{where} has {taken.sum()} tokens, more than seq_len {self.manifest.seq_len}")
        for conversation, length in zip(conversations, taken.tolist(), strict=False):
            kind = conversation.kind if self.manifest.group_by == "media" else "any"
            here.shortest[kind] = sorted([*here.shortest.get(kind, []), length])[:2]

    def _encoded_length(
        self, here: TarContents, where: str, conversation: Conversation, recorded: int, limit: int | None
    ) -> int:
        assert self.encoder is not None
        sample = f"{where}, sample {conversation.id}"
        try:
            one = self.encoder.encode(conversation)
            one = one if limit is None else one.truncated(limit)
        except EnergonPackedError as error:
            here.encoded.fail(f"{sample}: {error}")
            return recorded
        if recorded >= 0 and len(one) != recorded:
            here.encoded.fail(f"{sample} has {len(one)} tokens, recorded are {recorded}")
        if one.num_supervised == 0:
            here.encoded.fail(f"{sample} has no supervised token")
        return len(one)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on this thread alone: its thread pool does not outlive a fork, and the cores have a process each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def contents_checks(folder: PackedFolder, contents: list[TarContents], *, fast: bool) -> Iterator[Check]:
    """The checks of all tars together.

    Args:
        folder: the data set.
        contents: of its sound tars, by name.
        fast: samples were not encoded again.
    """
    manifest = folder.manifest
    total = sum((one.counts for one in contents), Counter[str]())
    joined = TarContents("")
    joined.packs.name = f"packs are {folder.sample_class}"
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
    yield _sums(manifest, contents, total)
    if layout_for(manifest.sample_class).packed and len(contents) == len(manifest.shards):
        yield _samples_share_rows(manifest, contents, total)


def _samples_share_rows(manifest: PackingManifest, contents: list[TarContents], total: Counter[str]) -> Check:
    """Packs hold more than one sample, where any two would fit a row."""
    check = Check("samples share rows", found=f"{total['samples'] / max(total['packs'], 1):.2f} samples a pack")
    in_order = manifest.algorithm not in ("bfd", "ffd", "best")
    unknown_kinds = manifest.group_by == "media" and manifest.sample_class == PackedTokensSample.__name__
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
    """The samples in the packs are those that lengths.parquet says, each as often.

    Two records of the input may have one id. Without lengths.parquet, one id with one text is the same sample twice.
    """
    check = Check("every sample is there once")
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
                check.fail(f"sample {ident} is in {where}, but lengths.parquet does not say that it is packed")
            elif is_twice:
                check.fail(f"sample {ident} is in {seen[ident]} and in {where}")
            seen[ident] = where
    for ident, count in (recorded or {}).items():
        if times[ident] < count:
            check.fail(f"sample {ident} is packed as lengths.parquet says, but is in no sound tar")
    check.found = f"{times.total():,} samples"
    if recorded is None:
        check.found += "; lengths.parquet is not here"
    return check


def _checksum(conversation: Conversation) -> int:
    if conversation.input_ids is not None:
        return zlib.crc32(conversation.input_ids.tobytes())
    texts = [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]
    return zlib.crc32("\0".join(texts).encode(errors="replace"))


def _sums(manifest: PackingManifest, contents: list[TarContents], total: Counter[str]) -> Check:
    check = Check("sums match packing.json", found=f"{total['tokens']:,} tokens")
    entries: dict[str, Any] = {shard.name: shard for shard in manifest.shards}
    for one in contents:
        for name in ("packs", "samples", "tokens"):
            recorded = getattr(entries[one.name], name)
            if one.counts[name] != recorded:
                check.fail(f"{one.name} has {one.counts[name]} {name}, packing.json says {recorded}")
    for name, recorded in (
        ("packs", manifest.packs),
        ("samples", manifest.packed),
        ("tokens", manifest.tokens),
        ("images", manifest.images),
    ):
        if total[name] != recorded:
            check.fail(f"the tars have {total[name]:,} {name}, packing.json says {recorded:,}")
    used = manifest.tokens / max(manifest.packs * manifest.seq_len, 1)
    if abs(used - manifest.utilization) > 1e-5:
        check.fail(f"packing.json has utilization {manifest.utilization}; tokens over packs x seq_len are {used:.6f}")
    return check


def _recorded_ids(folder: PackedFolder) -> Counter[str] | None:
    """How many packed records have each id, as lengths.parquet says: two of the input may have the same.

    None where the file is not here.
    """
    try:
        table = pq.read_table(folder.path.parent / "lengths.parquet", columns=["id", "status"])
    except (OSError, pa.ArrowInvalid):
        return None
    pairs = zip(table["id"].to_pylist(), table["status"].to_pylist(), strict=True)
    return Counter(ident for ident, status in pairs if status in (PACKED, TRUNCATED))
