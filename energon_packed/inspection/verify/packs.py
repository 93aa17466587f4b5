"""Check the contents of the packs: intact tars in, Checks out.

PackChecker is a task for one tar: it decodes samples and images, encodes the samples again, and returns TarContents.
JoinedContents has the sums of all tars, which `contents_checks` compares with packing.json and lengths.parquet.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import ChatEncoder, EncodedSample
from energon_packed.encoding.audio.audio_file import check_audio
from energon_packed.encoding.vision.images import load_image
from energon_packed.encoding.vision.video_file import check_video, read_video_info
from energon_packed.errors import (
    ConfigError,
    EnergonPackedError,
    FormatError,
    Reason,
    RecordError,
    Reject,
    ResourceError,
)
from energon_packed.files import DiskList
from energon_packed.formats import Codec, StoredSample
from energon_packed.formats.references import complete_parts, located_names
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify.check import Check, FailedChecks
from energon_packed.inspection.verify.files import NO_MANIFEST
from energon_packed.inspection.verify.groups import group_hashes, groups_whole
from energon_packed.inspection.verify.names import UInt64, differing, joined, name_hashes, with_values
from energon_packed.libraries import has_energon
from energon_packed.pipeline.measured.chunks import FRAGMENT, PACKED, TRUNCATED
from energon_packed.pipeline.output.run_reports import open_lengths, read_lengths
from energon_packed.records import AudioReference, Conversation, VideoReference
from energon_packed.seqlens import round_up
from energon_packed.shards import PackingManifest
from energon_packed.shards.scan import scan_tar

if _HAS_ENERGON := has_energon():  # otherwise, there is no encoder
    from energon_packed.flavors import load_pack
    from energon_packed.loading.process import checked_sample


_CHECKS = {
    "packs": "packs are of the flavor",
    "images": "images decode",
    "videos": "videos have the selected frames",
    "audios": "audio files decode to the packed samples",
    "fit": "packs fit seq_len",
    "encoded": "samples encode to their recorded length, with a supervised token",
    "whole": "groups are whole, each in one row",
}


@dataclass(slots=True)
class TarContents:
    """Contents of a tar.

    Attributes:
        name: file name of the tar.
        counts: number of packs, samples, images, videos, selected frames, audio files and tokens, and of supervised
            tokens of the encoded samples; and the sum of the checksums of their loss weights.
        ids: hash of the id of every sample, uint64 (n,), in order.
        checksums: checksum of its text or tokens, uint32 (n,).
        shortest: lengths of the two shortest samples that may share a row, by kind of media.
        changed: packs with a referenced image that changed, by file and change.
        groups: hash of pack, first sample and size of each group of at least two samples, uint64 (g,).
        failed: checks of this tar that failed, by their names in `_CHECKS`.
    """

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    ids: UInt64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    checksums: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    shortest: dict[str, list[int]] = field(default_factory=dict)
    changed: Counter[str] = field(default_factory=Counter)
    groups: UInt64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    failed: FailedChecks = field(default_factory=FailedChecks)


class ReadTar(NamedTuple):
    """A tar of JoinedContents.

    Attributes:
        name: file name of the tar.
        packs, tokens: their numbers.
        samples: place of its samples in the arrays of all tars.
        failed: as in TarContents.
    """

    name: str
    packs: int
    tokens: int
    samples: slice
    failed: FailedChecks


@dataclass(frozen=True, slots=True)
class JoinedContents:
    """Contents of all tars: hashes in files, sums, and little of each tar, as there may be thousands.

    Attributes:
        tars: the tars, sorted by name before the checks.
        ids, checksums, groups: as in TarContents.
        counts, shortest, changed: as in TarContents, of all tars.
    """

    tars: list[ReadTar] = field(default_factory=list)
    ids: DiskList = field(default_factory=lambda: DiskList(np.uint64))
    checksums: DiskList = field(default_factory=lambda: DiskList(np.uint32))
    groups: DiskList = field(default_factory=lambda: DiskList(np.uint64))
    counts: Counter[str] = field(default_factory=Counter)
    shortest: dict[str, list[int]] = field(default_factory=dict)
    changed: Counter[str] = field(default_factory=Counter)

    def add(self, tar: TarContents) -> None:
        """Add a tar."""
        own = slice(len(self.ids), len(self.ids) + len(tar.ids))
        self.tars.append(ReadTar(tar.name, tar.counts["packs"], tar.counts["tokens"], own, tar.failed))
        self.ids.extend(tar.ids)
        self.checksums.extend(tar.checksums)
        self.groups.extend(tar.groups)
        self.counts.update(tar.counts)
        self.changed.update(tar.changed)
        for kind, lengths in tar.shortest.items():
            self.shortest[kind] = sorted([*self.shortest.get(kind, []), *lengths])[:2]

    def check(self, name: str) -> Check:
        """Join a check of `_CHECKS` of all tars."""
        check = Check(_CHECKS[name])
        for tar in self.tars:
            check.add(tar.failed.get(name))
        return check


@dataclass(frozen=True, slots=True)
class PackChecker:
    """Task that checks every pack of a tar.

    Attributes:
        codec: codec of the flavor.
        encoder: encoder of the dataset, to encode every sample again; None skips that. If its `factor` is ambiguous,
            only samples without images are encoded.
        manifest: content of packing.json; None if a third-party tool packed the dataset.
    """

    codec: Codec
    encoder: ChatEncoder | None
    manifest: PackingManifest | None

    def __call__(self, tar: Path) -> TarContents:
        """Check an intact tar."""
        contents = TarContents(tar.name)
        ids: list[str] = []
        checksums: list[int] = []
        groups: list[tuple[str, int, int]] = []
        for key, samples, changes in self.packs(tar, contents):
            contents.counts["packs"] += 1
            contents.counts["samples"] += len(samples)
            conversations = [sample.conversation for sample in samples]
            contents.counts["images"] += sum([len(c.images) for c in conversations])
            selections = [video.frames for c in conversations for video in c.videos]
            contents.counts["videos"] += len(selections)
            contents.counts["frames"] += sum([len(frames.indices) for frames in selections if frames is not None])
            contents.counts["audios"] += sum([len(c.audios) for c in conversations])
            ids += [str(c.id) for c in conversations]
            checksums += [_checksum(c) for c in conversations]
            groups += _groups_of(contents, key, samples)
            contents.changed.update(changes)
            contents.counts["changed packs"] += bool(changes)
            self._check_pack(contents, key, samples, has_images=not changes)
        contents.ids, contents.checksums = name_hashes(ids), np.array(checksums, dtype=np.uint32)
        keys, firsts, sizes = zip(*groups, strict=True) if groups else ((), (), ())
        contents.groups = group_hashes(name_hashes(keys), np.array(firsts, np.int64), np.array(sizes, np.int64))
        return contents

    def packs(self, tar: Path, contents: TarContents) -> Iterator[tuple[str, list[StoredSample], set[str]]]:
        """Yield key, samples and changed images of each pack that can be read; the others fail in `contents`."""
        for raw in scan_tar(tar).packs():
            key = raw["__key__"]
            changes: set[str] = set()
            try:
                contents.counts["references"] += len(located_names(raw))
                # Once for both functions below, as media are read here.
                raw = complete_parts(raw, changes, with_paths=True)
                if _HAS_ENERGON:
                    load_pack(self.codec, raw)  # the function that loaders call, which may refuse more than `read`
                samples = self.codec.read(raw)
            except (ResourceError, ConfigError):
                raise
            except EnergonPackedError as error:
                contents.failed.fail("packs", f"{contents.name}: {key}: {error}")
                continue
            yield key, samples, changes

    def named(self, tar: Path, ids: UInt64, hashes: UInt64) -> Iterator[tuple[str, int, str]]:
        """Yield id, checksum and key of the pack of the samples of a tar whose ids have one of these hashes.

        Args:
            tar: the tar.
            ids: hashes of all its ids, as in TarContents.
            hashes: wanted hashes.
        """
        is_wanted = np.isin(ids, hashes)
        if not is_wanted.any():
            return
        wanted = iter(is_wanted.tolist())
        for key, samples, _ in self.packs(tar, TarContents(tar.name)):
            for sample in samples:
                if next(wanted):
                    yield str(sample.conversation.id), _checksum(sample.conversation), key

    def _check_pack(self, contents: TarContents, key: str, samples: list[StoredSample], *, has_images: bool) -> None:
        """Check the samples of a pack; without `has_images`, images and tokens are not checked."""
        pack = f"{contents.name}: {key}"
        damaged: set[int] = set()  # samples with damaged media, by index
        for place, sample in enumerate(samples) if has_images else ():
            media: tuple[tuple[Sequence[Any], Callable[[Any], Any], str], ...] = (
                (sample.conversation.images, load_image, "images"),
                (sample.conversation.videos, _check_video, "videos"),
                (sample.conversation.audios, _check_audio, "audios"),
            )
            for files, check, name in media:
                for file in files:
                    try:
                        check(file)
                    except RecordError as error:
                        contents.failed.fail(name, f"{pack}, sample {sample.conversation.id}: {error}")
                        damaged.add(place)
        encoded: list[EncodedSample | Reject | None] = [None] * len(samples)
        if self.encoder is not None and has_images:
            ambiguous = self.encoder.vision is not None and self.encoder.vision.ambiguous_layouts
            places = [
                place for place, sample in enumerate(samples) if not (ambiguous and sample.conversation.media_files)
            ]
            results = self.encoder.encode_many([samples[place].conversation for place in places])
            for place, result in zip(places, results, strict=True):
                # Only encoding resizes the frames of a video.
                if isinstance(result, Reject) and result.reason is Reason.CORRUPT_VIDEO and place not in damaged:
                    contents.failed.fail("videos", f"{pack}, sample {samples[place].conversation.id}: {result}")
                    damaged.add(place)
                if isinstance(result, Reject) and place in damaged:
                    contents.counts["damaged samples"] += 1
                else:
                    encoded[place] = result
                    contents.counts["encoded samples"] += 1
        lengths = [self._length(contents, key, *pair) for pair in zip(samples, encoded, strict=True)]
        # -1: neither recorded nor encoded.
        known = np.array([length for length in lengths if length > 0], dtype=np.int64)
        contents.counts["tokens"] += int(known.sum())
        contents.counts["unknown lengths"] += len(samples) - len(known)
        if self.manifest is None:
            return
        padded = round_up(known, self.manifest.pad_multiple)
        if padded.sum() > self.manifest.seq_len:
            contents.failed.fail("fit", f"{pack} has {padded.sum()} tokens, more than seq_len {self.manifest.seq_len}")
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
            contents.failed.fail("encoded", f"{name}: {error}")
            return recorded
        if recorded >= 0 and len(checked) != recorded:
            contents.failed.fail("encoded", f"{name} has {len(checked)} tokens, {recorded} are recorded")
        if checked.num_supervised == 0 and sample.conversation.needs_targets:
            contents.failed.fail("encoded", f"{name} has no supervised token")
        contents.counts["supervised tokens"] += checked.num_supervised
        contents.counts["weights"] += checked.weight_checksum
        return len(checked)


def _groups_of(contents: TarContents, key: str, samples: Sequence[StoredSample]) -> list[tuple[str, int, int]]:
    """Return pack, first sample and size of each group of at least two samples; its samples must be adjacent."""
    if not samples or samples[0].conversation.group is None:  # of a pack, all samples or none
        return []
    places: dict[str | None, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.conversation.group, []).append(place)
    for group, own in places.items():
        if own[-1] - own[0] >= len(own):
            contents.failed.fail(
                "whole", f"{contents.name}: {key}: samples of another group are between those of group {group}"
            )
    contents.counts["groups"] += sum([len(own) > 1 for own in places.values()])
    return [(key, own[0], len(own)) for own in places.values() if len(own) > 1]


def _check_video(video: VideoReference) -> None:
    """Compare the selected frames of a video with all frames of its file, or with the images of the frames.

    Raises:
        RecordError: a file is damaged, or has other frames.
    """
    frames = video.frames
    assert frames is not None  # of every codec
    if video.file is not None:
        info = read_video_info(video.file)
        found, expected = (info.num_frames, info.height, info.width), (frames.num_frames, frames.height, frames.width)
        if found != expected:
            raise RecordError(
                Reason.CORRUPT_VIDEO,
                "{} has {} frames of {} x {} pixels, and {} of {} x {} were selected from".format(
                    video.file.label, *found, *expected
                ),
            )
        # Stored times may be rounded to microseconds.
        if not np.allclose(info.timestamps[list(frames.indices)], frames.timestamps, rtol=0, atol=1e-5):
            raise RecordError(
                Reason.CORRUPT_VIDEO, f"the frames of {video.file.label} have other times than the selected frames"
            )
        check_video(video.file, frames)
    for image in video.images:
        size = load_image(image).size
        if size != (frames.width, frames.height):
            detail = f"a frame has {size[1]} x {size[0]} pixels, and its video {frames.height} x {frames.width}"
            raise RecordError(Reason.CORRUPT_IMAGE, detail)


def _check_audio(audio: AudioReference) -> None:
    """Decode an audio file, and compare its samples with those that were packed.

    Raises:
        RecordError: the file is damaged, or has other samples.
    """
    info, clip = check_audio(audio.file), audio.clip
    assert clip is not None  # of every codec
    if (info.samples, info.rate) != (clip.total, clip.rate):
        raise RecordError(
            Reason.CORRUPT_AUDIO,
            f"{audio.file.label} has {info.samples:,} samples at {info.rate:,} Hz, and {clip.total:,} at "
            f"{clip.rate:,} Hz were packed",
        )


def contents_checks(
    folder: PackedFolder,
    checker: PackChecker,
    contents: JoinedContents,
    unread: str,
    not_encoded: str,
) -> Iterator[Check]:
    """Join the checks of all tars.

    Args:
        folder: dataset.
        checker: the task that made `contents`.
        contents: contents of its intact tars.
        unread: which tars are not among the contents, for a message; "" if all are.
        not_encoded: why samples were not encoded again, if any were not.
    """
    manifest = folder.manifest
    total = contents.counts
    contents.tars.sort(key=lambda tar: tar.name)  # processes finish in any order
    packs, images, videos, audios, fit, encoded = map(contents.check, list(_CHECKS)[:6])
    packs.name = f"packs are {folder.codec.sample_class}"
    packs.summary, images.summary = f"{total['packs']:,} packs", f"{total['images']:,} images"
    videos.summary, audios.summary = f"{total['videos']:,} videos", f"{total['audios']:,} audio files"
    fit.summary = f"{manifest.seq_len:,} tokens" if manifest else ""
    encoded.summary = f"{total['encoded samples']:,} of {total['samples']:,} samples"
    packs.not_checked = images.not_checked = videos.not_checked = audios.not_checked = unread
    # Not every image was decoded while packing, so a bad image in an intact tar was bad in the input.
    if manifest is not None and manifest.images_decoded < manifest.images:
        images.remedy = "check-media"
    if manifest is not None and manifest.check_media != "full":
        videos.remedy = audios.remedy = "check-media"
    unknown = f"{total['unknown lengths']:,} samples have no recorded length" if total["unknown lengths"] else ""
    media = "images and videos" if total["videos"] else "images"
    if total["audios"]:
        media = f"{media} and audio files" if total["images"] or total["videos"] else "audio files"
    if changed := total["changed packs"]:
        not_encoded = not_encoded or f"{media} of {changed:,} packs changed"
        for check in (images, videos, audios):
            check.not_checked = unread or f"{media} of {changed:,} packs changed"
    damaged = ""
    if total["damaged samples"]:
        damaged = f"{media} of {total['damaged samples']:,} samples are damaged"
        not_encoded = not_encoded or damaged
    if total["encoded samples"] == total["samples"]:
        not_encoded, encoded.summary = "", f"{total['samples']:,} samples"
    encoded.not_checked = not_encoded or unread
    fit.not_checked = (NO_MANIFEST if manifest is None else unknown) or unread
    yield packs
    if total["references"]:
        yield _media_unchanged(total["references"], media, contents.changed, unread)
    yield _every_sample_once(checker, folder, contents, unread)
    yield images
    if total["videos"]:
        yield videos
    if total["audios"]:
        yield audios
    if total["groups"] or (manifest is not None and manifest.groups):
        file = folder.path.parent / "lengths.parquet"
        yield groups_whole(file, contents.check("whole"), contents.groups, total["groups"], unread)
    yield fit
    yield encoded
    if manifest is None:
        yield Check("sums match packing.json", not_checked=NO_MANIFEST)
    else:
        sums = _sums(manifest, contents, unknown, not_encoded)
        sums.not_checked = sums.not_checked or damaged
        yield sums
    if folder.codec.packed:
        yield _samples_share_rows(folder, contents, unknown or unread)


def _media_unchanged(files: int, media: str, changed: Counter[str], unread: str) -> Check:
    """Check that no referenced image or video changed; each file is listed once, with the number of its packs."""
    check = Check(f"referenced {media} are unchanged", summary=f"{files:,} {media}", not_checked=unread)
    for change, count in sorted(changed.items()):
        check.fail(f"{change} ({count:,} packs)")
    return check


def _samples_share_rows(folder: PackedFolder, contents: JoinedContents, unknown: str) -> Check:
    """Check that packs contain more than one sample, if two samples would fit a row; `unknown` names other samples."""
    total = contents.counts
    check = Check("samples share rows", summary=f"{total['samples'] / max(total['packs'], 1):.2f} samples a pack")
    manifest = folder.manifest
    if total["samples"] > total["packs"] or (manifest is not None and manifest.max_samples_per_pack == 1):
        return check
    if manifest is None:
        check.not_checked = NO_MANIFEST
    elif manifest.algorithm not in ("bfd", "ffd"):
        check.not_checked = f"the planner {manifest.algorithm} may leave two samples apart that would fit a row"
    elif manifest.group_by == "media" and folder.codec.stores_tokens:
        check.not_checked = "samples of tokens do not store their kind of media"
    else:
        check.not_checked = unknown
    if manifest is None or check.not_checked:
        return check
    # If the two shortest samples of a kind do not fit one row together, no two samples do.
    for shortest in contents.shortest.values():
        if len(shortest) == 2 and sum(shortest) <= manifest.seq_len:
            check.fail(
                f"{total['samples']:,} samples in {total['packs']:,} packs: nothing was packed, and two of "
                f"{shortest[0]} and {shortest[1]} tokens would fit a row of {manifest.seq_len}"
            )
            return check
    check.summary += f", as no two fit a row of {manifest.seq_len:,}"
    return check


def _every_sample_once(checker: PackChecker, folder: PackedFolder, contents: JoinedContents, unread: str) -> Check:
    """Check that each sample id is packed as often as lengths.parquet lists it as packed.

    Hashes of the ids are compared. Only samples whose hash occurs too often or too rarely are read again, for their
    names and packs.
    """
    check = Check("every sample is packed exactly once", not_checked=unread)
    if folder.manifest is None:
        check.not_checked = NO_MANIFEST
        return check
    ids, checksums = contents.ids.values, contents.checksums.values
    check.summary = f"{len(ids):,} samples"
    # The file is not needed for training, and may not be copied with the shards.
    is_listed = (folder.path.parent / "lengths.parquet").exists()
    recorded: Counter[str] = Counter()  # times that lengths.parquet lists each of the suspects
    try:
        if is_listed:
            suspects = differing(joined([ids]).sorted(), joined(map(name_hashes, _recorded_ids(folder))).sorted())
            for names in _recorded_ids(folder) if len(suspects) else ():
                is_suspect = np.isin(name_hashes(names), suspects).tolist()
                recorded.update(name for name, wanted in zip(names, is_suspect, strict=True) if wanted)
        else:
            # Records may share an id. Without lengths.parquet, only an equal id and an equal text are one sample.
            pairs = joined(with_values(ids[tar.samples], checksums[tar.samples]) for tar in contents.tars).repeated()
            suspects = joined(
                ids[tar.samples][np.isin(with_values(ids[tar.samples], checksums[tar.samples]), pairs)]
                for tar in (contents.tars if len(pairs) else ())
            ).sorted()
    except FormatError as error:
        check.fail(str(error))
        return check
    packs: dict[str, str] = {}  # the last pack of each sample id
    times: Counter[str] = Counter()
    contents_seen: Counter[tuple[str, int]] = Counter()
    for tar in contents.tars if len(suspects) else ():
        for ident, checksum, key in checker.named(folder.path / tar.name, ids[tar.samples], suspects):
            times[ident] += 1
            pack = f"{tar.name}: {key}"
            is_repeated = times[ident] > recorded[ident] > 0 if is_listed else contents_seen[ident, checksum] > 0
            contents_seen[ident, checksum] += 1
            if is_listed and not recorded[ident]:
                check.fail(f"sample {ident} is in {pack}, but lengths.parquet does not list it as packed")
            elif is_repeated:
                check.fail(f"sample {ident} is in {packs[ident]} and in {pack}")
            packs[ident] = pack
    for ident, count in recorded.items():
        if times[ident] < count:
            check.fail(f"sample {ident} is listed as packed in lengths.parquet, but is in no intact tar")
    if not is_listed and not unread:
        check.not_checked = "there is no lengths.parquet, so only repeated samples are found"
    return check


def _checksum(conversation: Conversation) -> int:
    """CRC-32 of the tokens or the text: enough to distinguish samples with equal ids."""
    if conversation.input_ids is not None:
        return zlib.crc32(conversation.input_ids.tobytes())
    strings = [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]
    return zlib.crc32("\0".join(strings).encode(errors="replace"))


def _sums(manifest: PackingManifest, contents: JoinedContents, unknown: str, not_encoded: str) -> Check:
    """Check that the counts of the packs match packing.json, for each shard and in total.

    Sums of tokens are not compared if samples have an `unknown` length, and of targets and their loss weights if they
    are `not_encoded`.
    """
    total = contents.counts
    check = Check("sums match packing.json", summary=f"{total['tokens']:,} tokens", not_checked=unknown)
    entries: dict[str, Any] = {shard.name: shard for shard in manifest.shards}
    for tar in contents.tars:
        counts = {"packs": tar.packs, "samples": tar.samples.stop - tar.samples.start}
        for name, count in (counts if unknown else counts | {"tokens": tar.tokens}).items():
            recorded = getattr(entries[tar.name], name)
            if count != recorded:
                check.fail(f"{tar.name} has {count} {name}, packing.json has {recorded}")
    # Totals are compared as well: a shard that is missing changes only them.
    totals = {"packs": manifest.packs, "samples": manifest.packed, "images": manifest.images}
    totals |= {"videos": manifest.videos, "frames": manifest.frames, "audios": manifest.audios}
    totals["groups"] = manifest.groups
    if not unknown:
        totals["tokens"] = manifest.tokens
    if not not_encoded and manifest.supervised_tokens is not None:
        totals["supervised tokens"] = manifest.supervised_tokens
    for name, recorded in totals.items():
        if total[name] != recorded:
            check.fail(f"the tars have {total[name]:,} {name}, packing.json has {recorded:,}")
    weights = total["weights"] % 2**63
    if not not_encoded and weights != manifest.weight_checksum:
        check.fail(
            f"the loss weights and columns in the tars have the checksum {weights}, and those of the records, in "
            f"packing.json, have {manifest.weight_checksum}"
        )
    actual = manifest.tokens / max(manifest.packs * manifest.seq_len, 1)
    if abs(actual - manifest.utilization) > 1e-5:  # it is stored with six decimals
        check.fail(
            f"packing.json has utilization {manifest.utilization}, but tokens / (packs * seq_len) is {actual:.6f}"
        )
    return check


def _recorded_ids(folder: PackedFolder) -> Iterator[list[str]]:
    """Yield the ids of the packed records and fragments in lengths.parquet, in batches."""
    with open_lengths(folder.path.parent / "lengths.parquet") as file:
        for batch in read_lengths(file, ["id", "status"]):
            pairs = zip(batch["id"].to_pylist(), batch["status"].to_pylist(), strict=True)
            yield [str(ident) for ident, status in pairs if status in (PACKED, TRUNCATED, FRAGMENT)]
