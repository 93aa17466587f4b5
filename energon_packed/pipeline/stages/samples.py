"""Records of a shard, read again as stored samples.

Input: an entry of RecordRefs, the files of its tokens and frames, and the input. Output: a StoredSample with the
media of its record, or a SourceError if the record or its media changed since it was measured.

    RecordRefs ──records_of──► RecordEntry ──SampleReader──► StoredSample
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from energon_packed.encoding.audio.audio_file import cut_audio, is_cut
from energon_packed.encoding.audio.media import stored_bytes
from energon_packed.encoding.fragments import fragment_id
from energon_packed.encoding.vision.images import as_jpeg, frame_as_jpeg, sniff_extension
from energon_packed.encoding.vision.media import with_image_counts
from energon_packed.encoding.vision.video_file import decode_frames
from energon_packed.errors import EnergonPackedError, RecordError, SourceError
from energon_packed.formats import StoredSample
from energon_packed.pipeline.batches import batches
from energon_packed.pipeline.measured.chunk_reader import RecordOffsets, TokenReader, read_frames
from energon_packed.pipeline.measured.chunks import MediaFiles
from energon_packed.pipeline.measured.table import RecordRefs
from energon_packed.pipeline.media.locator import MediaLocator
from energon_packed.pipeline.reader import RecordReader
from energon_packed.records import AudioClip, AudioReference, Conversation, MediaReference, VideoReference
from energon_packed.records.groups import group_key
from energon_packed.records.media.file_types import stored_extension
from energon_packed.records.media.reference import urls_of
from energon_packed.storage import MOST_TOGETHER, READ_AHEAD, is_remote, request_objects
from energon_packed.system import raise_resource_error

_NO_CONTENT = np.zeros(1, dtype=np.int64)
_BATCH_BYTES = MOST_TOGETHER * READ_AHEAD // 2  # of the media of a batch, if it has several records


class RecordEntry(NamedTuple):
    """Entry of `RecordRefs`, and its index there."""

    entry: int
    source: int
    row: int
    address: int
    size: int
    length: int
    media_bytes: int
    media_stamp: int
    fragment: np.void | None


def records_of(records: RecordRefs) -> Iterator[RecordEntry]:
    """Return the entries in order."""
    columns = [getattr(records, name).tolist() for name in RecordEntry._fields[1:-1]]  # Python integers, all at once
    fragments: Iterable[np.void | None] = itertools.repeat(None, len(records))
    if records.fragments is not None:
        fragments = [fragment if fragment["number"] >= 0 else None for fragment in records.fragments]
    return map(RecordEntry, itertools.count(), *columns, fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """The form in which samples are stored.

    Attributes:
        truncate: length to which longer samples are truncated, or None.
        keep_bytes: for a layout whose images are named `.jpg`: do not convert images of other formats, nor images with
            an EXIF orientation; store their bytes under that name.
        extract_frames: store the selected frames of a video file as JPEG images instead of its bytes.
        timestamps: the measured lengths of records with `fps` have the timestamps of their frames.
        locator: stores the location of images and videos instead of their bytes; None stores the bytes.
    """

    truncate: int | None
    keep_bytes: bool = False
    extract_frames: bool = False
    timestamps: bool = False
    locator: MediaLocator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReader:
    """Reader of the samples of a shard.

    Attributes:
        reader: reads records as the measure stage did.
        settings: the form of the samples.
        tokens: reader of the tokens of the shard; None for flavors without tokens.
        frames: files of the selected frames and clips of the shard; None if no record has videos or audio.
    """

    reader: RecordReader
    settings: SampleSettings
    tokens: TokenReader | None
    frames: RecordOffsets | None
    # The split records without images that were read, without their content, by source and index: a long document has
    # thousands of fragments, so it is not read again for each.
    _split: dict[tuple[int, int], Conversation] = field(default_factory=dict)
    # The last record that is a group, with its media: its samples follow each other.
    _group: dict[tuple[int, int], StoredSample] = field(default_factory=dict)
    # The records of a batch whose media files were read, and are still to be compared.
    _to_compare: list[tuple[RecordEntry, tuple[MediaReference, ...]]] = field(default_factory=list)

    def read_all(self, records: Iterable[RecordEntry]) -> Iterator[StoredSample]:
        """Read records and fragments and their media again, in order; and their tokens if the flavor stores tokens.

        Objects of an object store are requested together, batch by batch.

        Raises:
            SourceError: a record or its media changed since it was measured.
        """
        is_remote_input = any(
            [is_remote(source.image_root) or is_remote(source.data) for source in self.reader.sources]
        )
        # Extracted frames need more memory than the bytes of their video.
        most = MOST_TOGETHER if is_remote_input and not self.settings.extract_frames else 1
        for batch in batches(records, most, attrgetter("media_bytes"), _BATCH_BYTES):
            if is_remote_input:
                self._request(batch)
            yield from self._read_and_compare(batch)

    def _read_and_compare(self, batch: Sequence[RecordEntry]) -> list[StoredSample]:
        """Read a batch, which `read_all` does not keep while it reads the next."""
        samples = list(map(self._read, batch))
        self._compare()
        return samples

    def _request(self, records: Sequence[RecordEntry]) -> None:
        """Request the records of a batch, and then their media, that are in object stores."""
        for number in {record.source for record in records}:
            own = [(record.address, record.size) for record in records if record.source == number]
            self.reader.sources[number].request(own)
        urls: list[str] = []
        for key, record in {(record.source, record.row): record for record in records}.items():
            is_read = key in self._group or not record.media_stamp
            if not is_read and is_remote(self.reader.sources[record.source].image_root):
                with suppress(EnergonPackedError, OSError):  # raised again by reading the record
                    urls += urls_of(self._conversation(record).files)
        request_objects(urls, whole=True)

    def _compare(self) -> None:
        """Compare size and time of media files, after they were read, so that no change is missed.

        A digest of their content would have to read all media while measuring.
        """
        media = MediaFiles([url for _, files in self._to_compare for url in urls_of(files)])
        for record, files in self._to_compare:
            if media.stamp(files) != record.media_stamp:
                raise self._changed(record, "its media was replaced")
        self._to_compare.clear()

    def _read(self, record: RecordEntry) -> StoredSample:
        truncate = self.settings.truncate
        try:
            if self.tokens is not None and (group := self._group.get((record.source, record.row))) is not None:
                return self._with_tokens(replace(group, length=record.length), record, self.tokens)
            sample = StoredSample(
                conversation=self._conversation(record),
                length=min(record.length, truncate or record.length),
                truncate=truncate,
                is_truncated=truncate is not None and record.length > truncate,
            )
            if sample.conversation.media_files:
                sample = self._with_media(sample, record)
            elif record.media_bytes:
                raise self._changed(record, f"it has no media any more, but had {record.media_bytes} bytes")
            if sample.conversation.members:
                self._group.clear()
                self._group[record.source, record.row] = sample
            if self.tokens is not None:
                return self._with_tokens(sample, record, self.tokens)
            conversation = sample.conversation
            if self.settings.timestamps and conversation.fps and conversation.images:
                return replace(sample, conversation=replace(conversation, timestamps=True))
            return sample
        except (RecordError, OSError) as error:
            raise_resource_error(error, self.reader.sources[record.source].path)
            raise self._changed(record, str(error)) from error

    def _conversation(self, record: RecordEntry) -> Conversation:
        source, row = record.source, record.row
        if (conversation := self._split.get((source, row))) is not None:
            return conversation
        conversation = self.reader.read(source, record.address, record.size, row)
        # Records with videos are not split.
        if record.fragment is not None and not (conversation.images or conversation.members):
            self._split[source, row] = Conversation(id=conversation.id, input_ids=_NO_CONTENT)
        return conversation

    def _with_media(self, sample: StoredSample, record: RecordEntry) -> StoredSample:
        """Read the images, patch positions and videos of the conversation, which must be as they were measured."""
        conversation = sample.conversation
        stored = self._with_images(conversation)
        media_bytes = sum([file.num_bytes() for file in (*stored.images, *stored.patch_positions)])
        if conversation.videos or conversation.audios:
            conversation, clips = self._with_frames(conversation, record)
            conversation = conversation if self.tokens is None else with_image_counts(conversation)
            videos = tuple([self._stored_video(video) for video in conversation.videos])
            media_bytes += sum(map(_read_bytes, conversation.videos, videos))
            audios = [self._stored_audio(*pair) for pair in zip(conversation.audios, clips, strict=True)]
            media_bytes += sum([num_bytes for _, num_bytes in audios])
            stored = replace(stored, videos=videos, audios=tuple([audio for audio, _ in audios]))
        if media_bytes != record.media_bytes:
            raise self._changed(record, f"its media has {media_bytes} bytes, not {record.media_bytes}")
        self._to_compare.append((record, conversation.files))
        if self.reader.layout and not self.settings.keep_bytes:
            images = [MediaReference(data=as_jpeg(image.read()), extension="jpg") for image in stored.images]
            stored = replace(stored, images=tuple(images))
        return replace(sample, conversation=stored)

    def _with_images(self, conversation: Conversation) -> Conversation:
        """Read the images and patch positions of a conversation, or of the members of a group."""
        if conversation.members:
            return replace(conversation, members=tuple(map(self._with_images, conversation.members)))
        return replace(
            conversation,
            images=tuple(map(self._stored_file, conversation.images)),
            patch_positions=tuple([MediaReference(data=file.read()) for file in conversation.patch_positions]),
        )

    def _with_tokens(self, sample: StoredSample, record: RecordEntry, tokens: TokenReader) -> StoredSample:
        """Replace the text of the conversation by its tokens; of a fragment, with the images in these tokens."""
        encoded = tokens.read(record.entry, record.length, record.fragment)
        if self.settings.truncate:
            encoded = encoded.truncated(self.settings.truncate)
        own = sample.conversation
        ident, shown, placed = own.id, slice(None), slice(None)
        key = None if own.group is None else group_key(record.source, own.group)
        if (fragment := record.fragment) is not None:
            ident = fragment_id(str(ident), int(fragment["number"]))
            shown = placed = slice(int(fragment["first_image"]), int(fragment["last_image"]))
        if fragment is not None and fragment["member"]:
            members, number = sample.conversation.members, int(fragment["number"])
            if number >= len(members):
                raise self._changed(record, f"it has {len(members)} samples, and had more")
            own, key = members[number], group_key(record.source, record.row)
            files = sum([len(member.patch_positions) for member in members[:number]])
            placed = slice(files, files + len(own.patch_positions))
        conversation = Conversation(
            id=ident,
            input_ids=encoded.input_ids,
            labels=encoded.labels,
            loss_weights=encoded.loss_weights,
            columns=encoded.columns,
            images=sample.conversation.images[shown],
            patch_positions=sample.conversation.patch_positions[placed],
            videos=sample.conversation.videos,
            audios=sample.conversation.audios,
            group=key,
            role=own.role,
            label=own.label,
        )
        return replace(sample, conversation=conversation)

    def _stored_file(self, file: MediaReference, *, is_audio: bool = False) -> MediaReference:
        """Return the location of a media file, or its bytes; in a layout, images have the name of a JPEG."""
        if self.settings.locator is not None:
            return self.settings.locator.locate(file, is_audio=is_audio)
        data = file.read()
        extension = stored_extension(data) if is_audio else "jpg" if self.reader.layout else sniff_extension(data)
        return MediaReference(data=data, settings=file.settings, extension=extension)

    def _stored_audio(self, audio: AudioReference, clip: AudioClip) -> tuple[AudioReference, int]:
        """Return an audio file, or only the clip of a much longer file, and the bytes that were measured for it."""
        num_bytes = audio.file.num_bytes()
        if self.settings.locator is None and is_cut(clip, num_bytes):
            alone = AudioClip(rate=clip.rate, start=0, samples=clip.samples, total=clip.samples)
            cut = MediaReference(data=cut_audio(audio.file, clip), extension="wav")
            stored = AudioReference(file=cut, clip=alone)
        else:
            stored = AudioReference(file=self._stored_file(audio.file, is_audio=True), clip=clip)
        return stored, stored_bytes(clip, num_bytes)

    def _with_frames(
        self, conversation: Conversation, record: RecordEntry
    ) -> tuple[Conversation, Sequence[AudioClip]]:
        """Add the frames and clips that were selected when the record was measured; the clips are returned, too."""
        selections, clips = ((), ()) if self.frames is None else read_frames(self.frames, record.entry)
        if len(selections) != len(conversation.videos):
            raise self._changed(record, f"it has {len(conversation.videos)} videos, and had {len(selections)}")
        if len(clips) != len(conversation.audios):
            raise self._changed(record, f"it has {len(conversation.audios)} audio files, and had {len(clips)}")
        videos = zip(conversation.videos, selections, strict=True)
        audios = zip(conversation.audios, clips, strict=True)
        measured = replace(
            conversation,
            videos=tuple([replace(video, frames=selected) for video, selected in videos]),
            audios=tuple([AudioReference(file=audio.file, clip=clip) for audio, clip in audios]),
        )
        return measured, clips

    def _stored_video(self, video: VideoReference) -> VideoReference:
        """Return the location or the bytes of a video with its selected frames, or these frames as images."""
        assert video.frames is not None  # of `_with_frames`
        if video.file is None:
            return replace(video, images=tuple(map(self._stored_file, video.images)))
        if not self.settings.extract_frames:
            return replace(video, file=self._stored_file(video.file))
        frames = map(frame_as_jpeg, decode_frames(video.file, video.frames))
        images = tuple([MediaReference(data=frame, extension="jpg") for frame in frames])
        return replace(video, file=None, images=images)

    def _changed(self, record: RecordEntry, change: str) -> EnergonPackedError:
        return changed_record(self.reader, record.source, record.row, change, has_files=record.media_stamp != 0)


def _read_bytes(video: VideoReference, stored: VideoReference) -> int:
    """Bytes of the files that a stored video was made of."""
    if video.file is None or stored.file is not None:
        return sum([file.num_bytes() for file in stored.files])
    return video.file.num_bytes()


def changed_record(reader: RecordReader, source: int, row: int, change: str, *, has_files: bool) -> EnergonPackedError:
    """Error for a record whose content or media changed since it was measured; the next run finds changed files."""
    remedy = "run again" if has_files else "run again with `resume=False`"
    path = reader.sources[source].path
    return SourceError(f"record {row} of {path} changed since it was measured ({change}); {remedy}")
