"""FolderPacks: a dataset folder in; its packs by index, their lengths, and their sizes for costs, out."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from energon_packed.arrays import blocks
from energon_packed.encoding import Processor, SampleSource
from energon_packed.encoding.audio.audio_file import resampled_length
from energon_packed.encoding.vision.media import measure_media
from energon_packed.errors import ConfigError
from energon_packed.files import disk_array
from energon_packed.flavors import PackSample, load_pack
from energon_packed.formats import Codec, codec_for, codec_of
from energon_packed.formats.audios import is_audio_part
from energon_packed.formats.references import MEDIA_PART, complete_packs, emptied, located_names
from energon_packed.formats.videos import is_video_part
from energon_packed.loading.costs.model import RowSizes
from energon_packed.loading.datasets.manifests import LoadedSplit, digests_of
from energon_packed.loading.datasets.recorded_lengths import PackSums, recorded_sums
from energon_packed.loading.permutation import Permutation
from energon_packed.packing.balance import Int64
from energon_packed.shards.nv_meta import shards_in_split
from energon_packed.shards.reader import ShardReader

_log = logging.getLogger(__name__)
_MAX_WITH_MEDIA = 20_000
"""Packs of a dataset whose images are read for their costs: more would need minutes when training starts."""


class FolderPacks:
    """The packs of a dataset folder, by index.

    Args:
        split: of the folder.
        encoder: computes patches of images, and lengths that are not recorded; None if neither is needed.
        media_root: as for PackedDataset.

    Attributes:
        reader: access to the tars.
        source: of the samples.
    """

    def __init__(
        self, split: LoadedSplit, encoder: Processor | None, media_root: Mapping[str, str] | None = None
    ) -> None:
        tars = shards_in_split(split.listed, split.split)
        self.reader = ShardReader(tars, digests_of(split), media_root, found=split.found)
        self.source = SampleSource(str(split.path), dict(split.subflavors))
        self._split, self._manifest = split, split.manifest
        self._encoder = encoder

    def samples(self, packs: Sequence[int]) -> list[PackSample]:
        """The samples of packs, not encoded; what is in object stores is requested together."""
        raws = complete_packs(self.reader.packs(packs), with_paths=True)
        return [load_pack(self._codec, raw) for raw in raws]

    def describe(self, pack: int) -> str:
        """Tar and index of a pack, for error messages."""
        shard, _, _ = self.reader.locate(pack)
        return f"{self.reader.tars[shard]}, pack {pack} of its split"

    def lengths(self) -> Int64:
        """Tokens of each pack, int64 (P,)."""
        return self._sums(range(len(self.reader)), 1).tokens

    def sizes(self) -> RowSizes:
        """Sizes that determine the cost of each pack."""
        sizes, note = self.sizes_of(range(len(self.reader)), max_with_media=_MAX_WITH_MEDIA)
        if note:
            _log.info("%s: %s", self.source.dataset, note)
        return sizes

    def sizes_of(self, packs: Sequence[int], *, max_with_media: int, multiple: int = 1) -> tuple[RowSizes, str]:
        """Compute sizes of packs from their lengths, with the padding that they were planned with, and their images.

        Args:
            packs: P indices, ascending.
            max_with_media: packs whose images are read. If more packs have images, a seeded selection of this many is
                read, and each image of the others counts with the mean.
            multiple: each sample is padded to a multiple of it, too.

        Returns:
            (sizes, a note if only some images were read).
        """
        padded = int(np.lcm(multiple, 1 if self._manifest is None else self._manifest.pad_multiple))
        tokens, squares, media = self._sums(packs, padded)
        if not self._counts_patches:
            none = np.broadcast_to(np.zeros((), dtype=np.int64), len(packs))
            return RowSizes(tokens=tokens, squares=squares, patches=none, patch_squares=none), ""
        patches, patch_squares = (disk_array(None, len(packs), np.int64) for _ in range(2))
        chosen, count = np.arange(min(len(packs), max_with_media)), 0
        if len(packs) > max_with_media:
            media = self._media(packs) if media is None else media
            chosen, count = _some_with_media(media, max_with_media)
        for row in chosen.tolist():
            own = np.array(self.patches(packs[row]), dtype=np.float64)
            patches[row], patch_squares[row] = own.sum(), (own**2).sum()
        sizes = RowSizes(tokens=tokens, squares=squares, patches=patches, patch_squares=patch_squares)
        if media is None or len(chosen) >= count:
            return sizes, ""
        for column in (patches, patch_squares):
            exact = column[chosen]
            for block in blocks(len(column)):
                column[block] = (media[block] * (exact.sum() / media[chosen].sum())).round()
            column[chosen] = exact
        return sizes, f"images of {len(chosen):,} of {count:,} packs were read; others count with the mean"

    def _sums(self, packs: Sequence[int], multiple: int) -> PackSums:
        """Sums over the samples of P packs: of all packs from lengths.parquet, if it has them, otherwise from tars."""
        if len(packs) == len(self.reader) and (recorded := recorded_sums(self._split, self.reader, multiple)):
            return recorded
        tokens, squares = (disk_array(None, len(packs), np.int64) for _ in range(2))
        for row, pack in enumerate(packs):
            padded = -(-np.array(self.sample_lengths(pack), dtype=np.int64) // multiple) * multiple
            tokens[row], squares[row] = padded.sum(), (padded**2).sum()
        return PackSums(tokens, squares, None)

    def _media(self, packs: Sequence[int]) -> Int64:
        """Number of media of each of P packs, int64 (P,)."""
        media = disk_array(None, len(packs), np.int64)
        for row, pack in enumerate(packs):
            media[row] = self.num_media(pack)
        return media

    @property
    def _counts_patches(self) -> bool:
        """Whether packs may have patches, and the encoder can count them."""
        encoder = self._encoder
        return self.has_media and encoder is not None and not (encoder.vision is None and encoder.audio is None)

    @property
    def has_media(self) -> bool:
        """Whether packs may have images, videos or audio."""
        m = self._manifest
        return m is None or bool(m.images or m.videos or m.audios)

    @cached_property
    def _codec(self) -> Codec:
        return codec_for(self._manifest.sample_class) if self._manifest else codec_of(self.reader[0])

    def sample_lengths(self, pack: int) -> list[int]:
        """Tokens of each sample of a pack: the recorded lengths, else measured.

        Raises:
            ConfigError: no lengths are recorded, and there is no encoder.
        """
        # Only the member with the lengths is read, and no image.
        lengths = self._codec.lengths(self.reader.part(pack, self._codec.lengths_part))
        if None not in lengths:
            return [length for length in lengths if length is not None]
        if self._encoder is None:
            raise ConfigError(f"{self.source.dataset} records no lengths, so it needs an encoder. Pass `tokenizer`.")
        return [self._encoder.length(conversation) for conversation in self.samples([pack])[0].conversations()]

    def num_media(self, pack: int) -> int:
        """Number of images, videos, stored frames and audio files of a pack, from the names of its members."""
        raw: dict[str, Any] = {}
        names = set()
        for member, content in self.reader.members(pack, only=(MEDIA_PART,)):
            names.add(member.part)
            if member.part == MEDIA_PART:
                raw[member.part] = content
        names |= located_names(raw)
        return sum(_is_large(name) or (name.startswith("img") and not name.endswith(".npy")) for name in names)

    def patches(self, pack: int) -> list[int]:
        """Patches of each image of a pack, of each temporal patch of its videos, and positions of each audio file."""
        if self._encoder is None or not self._counts_patches:
            return []
        vision, audio = self._encoder.vision, self._encoder.audio
        # Selected frames and clips are in the json: video and audio files, larger than all the rest, are not read.
        raw = emptied(self.reader.parts(pack, only=_NotLarge()), _is_large)
        conversations = load_pack(self._codec, raw).conversations()
        clips = [file.clip for conversation in conversations for file in conversation.audios]
        heard = (
            []
            if audio is None
            else [audio.positions(resampled_length(clip.samples, clip.rate, audio.rate)) for clip in clips if clip]
        )
        if vision is None:
            return heard
        conversations = [c for c in conversations if c.images or c.videos]
        media = [measure_media(vision, conversation) for conversation in conversations]
        # An image token represents merge_size x merge_size patches.
        patches = [run.length * vision.merge_size**2 for size in media for run in size.runs if not run.is_video]
        if vision.video_token is not None:  # otherwise the frames of a video are images
            for steps, height, width in [vision.video_grid(frames) for size in media for frames in size.frames]:
                patches += [height * width] * steps
        return patches + heard


def _is_large(name: str) -> bool:
    """Whether a part is an audio file, a video file or a frame of it."""
    return is_video_part(name) or is_audio_part(name)


def _some_with_media(media: Int64, most: int) -> tuple[Int64, int]:
    """Choose packs with media.

    Args:
        media: int64 (P,), media of each pack.
        most: packs to choose.

    Returns:
        (int64 (n,), the same choice in each process, ascending; packs with media).
    """
    count = sum(int(np.count_nonzero(media[block])) for block in blocks(len(media)))
    wanted = np.sort(Permutation(count, [0])(np.arange(min(count, most))))  # of the packs with media
    chosen, before = [wanted[:0]], 0
    for block in blocks(len(media)):
        own = np.flatnonzero(media[block]) + block.start
        first, last = np.searchsorted(wanted, [before, before + len(own)])
        chosen.append(own[wanted[first:last] - before])
        before += len(own)
    return np.concatenate(chosen), count


class _NotLarge:
    """Names of all other parts of a pack."""

    def __contains__(self, name: object) -> bool:
        return not _is_large(str(name))
