"""RecordReader, which converts the records of all sources to conversations, the same way in every stage.

Input: an opened record of a source, or its address. Output: a `Conversation`, or a RecordError with reason and
detail.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from energon_packed.errors import IgnoredEntries, Reason, RecordError
from energon_packed.formats import Codec, codec_for
from energon_packed.formats.references import MediaRoot, moved_folders, moved_here, moved_path
from energon_packed.pipeline.options import AUTO, CAPTIONING, TOKENS, InputOptions, part_suffix
from energon_packed.pipeline.rejects import Rejected, RejectedAt
from energon_packed.records import Conversation, MediaReference, normalize
from energon_packed.records.conversation import with_files
from energon_packed.records.groups import read_group, with_group
from energon_packed.records.normalize import RecordWeight
from energon_packed.records.record_formats import find_record_format
from energon_packed.sources import Source, SourceRecord, open_sources, refuse_outputs
from energon_packed.system import announced

OUTSIDE = "absolute paths of media: pack needs --image-root"
"""Note of a conversation whose media are measured, although their paths leave the image root."""


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """Reader of the records of all sources as conversations.

    Attributes:
        sources: the input.
        sample_class: flavor to write; conversations that it cannot store are rejected. `auto` accepts all.
        use_patch_positions: False ignores the .npy files that records name.
        layout: stricter variant of the flavor, or "".
        part: index of the input part, or None for the complete input.
        ignored_entries: entries of input folders that are not read, by reason.
        record_weight: meaning of a weight of a record, as in `normalize`.
        media_root: folders that moved since a pack stored the location of its images, as (old, new).
        unbounded: sources whose absolute media paths may be outside `image_root`; a note counts such records.
        group_field: field with the key of the group of a record, or None.
    """

    sources: Sequence[Source]
    sample_class: str
    use_patch_positions: bool
    layout: str = ""
    part: int | None = None
    ignored_entries: Sequence[IgnoredEntries] = ()
    record_weight: RecordWeight = "refuse"
    media_root: MediaRoot = ()
    unbounded: Collection[int] = ()
    group_field: str | None = None

    def conversation(self, source: int, row: SourceRecord) -> Conversation:
        """Convert a record to a conversation, whose `id` is None if the record has no id.

        Raises:
            RecordError: the record cannot be used.
        """
        try:
            return self._conversation(source, row)
        except RecursionError:
            raise RecordError(Reason.BAD_JSON, "its objects and lists are nested too deeply to be read") from None

    def _conversation(self, source: int, row: SourceRecord) -> Conversation:
        reading = self.sources[source].reading
        # First of all: a record that is not sampled is rejected as `not_sampled`, whatever else is wrong with it.
        if reading.fraction < 1:
            reading.check_sampled(row.address)
        if row.reject is not None:
            raise RecordError.of(row.reject)
        record = self._mapped(source, row)
        if isinstance(record, Conversation):
            conversation = record
        else:
            if not self.use_patch_positions and isinstance(record, Mapping) and "patch_positions" in record:
                record = {name: value for name, value in record.items() if name != "patch_positions"}
            conversation = normalize(
                record, image_root=self.sources[source].media_folder, record_weight=self.record_weight
            )
            if self.group_field is not None and isinstance(record, Mapping):
                conversation = with_group(conversation, record, self.group_field)
        if reading.copy and conversation.id is not None:
            conversation = conversation.named(reading.named(conversation.id))
        if self.media_root and any(file.packed for file in conversation.media_files):
            conversation = with_files(conversation, self._moved)
        if source in self.unbounded and (outside := with_files(conversation, _without_root)) != conversation:
            conversation = replace(outside, notes=(*conversation.notes, OUTSIDE))
        if conversation.patch_positions and not self.use_patch_positions:
            members = tuple([replace(member, patch_positions=()) for member in conversation.members])
            conversation = replace(conversation, patch_positions=(), members=members)
        if self.sample_class != AUTO:  # `auto` falls back to a flavor that stores every conversation
            codec = self._codec
            _check_stored(conversation, codec)
            codec.check(conversation)
            conversation = codec.fitted(conversation)
        return conversation

    def _mapped(self, source: int, row: SourceRecord) -> Any:
        """Apply the adapter and the field map of the source."""
        reading, record = self.sources[source].reading, row.record
        if reading.adapter is not None:
            record = reading.adapter.apply(record)
        if reading.field_map is not None and not isinstance(record, Conversation):
            record = reading.field_map.apply(record)
        return record

    def format_of(self, source: int, row: SourceRecord) -> str:
        """Name of the record format of a record, after the adapter and the field map; "" if it has none."""
        try:
            record = self._mapped(source, row) if row.reject is None else None
            record = {"messages": record} if isinstance(record, list) else record
            return find_record_format(record).key if isinstance(record, Mapping) else ""
        except (RecordError, RecursionError):
            return ""

    @property
    def _codec(self) -> Codec:
        return codec_for(self.sample_class, self.layout)

    def _moved(self, file: MediaReference) -> MediaReference:
        if file.packed is None or file.path is None:
            return file
        return replace(file, path=moved_path(file.path, self.media_root))

    def fits_captioning(self, conversation: Conversation) -> bool:
        """Whether PackedCaptioningSample can store the conversation; True after `auto` is resolved."""
        if self.sample_class != AUTO:
            return True
        if conversation.members or conversation.group is not None or conversation.label is not None:
            return False
        try:
            codec_for(CAPTIONING).check(conversation)
        except RecordError:
            return False
        return True

    def group_of(self, record: Any) -> str | None:
        """Key of the group of a rejected record; None if it has none, or has it only after an adapter."""
        try:
            return read_group(record, self.group_field) if isinstance(record, Mapping) and self.group_field else None
        except RecordError:
            return None

    def read(self, source: int, address: int, size: int, row: int | None = None) -> Conversation:
        """Read the record at an address as a conversation; with the index of the record, it always has an id."""
        conversation = self.conversation(source, self.sources[source].read(address, size))
        if row is None or conversation.id is not None:
            return conversation
        return conversation.named(self.default_id(source, row))

    def default_id(self, source: int, row: int) -> str:
        """Id of a record without an id: the file, the input part and the index of the record in them."""
        return self.sources[source].reading.named(f"{self._names[source]}{part_suffix(self.part)}:{row}")

    def rejected(self, source: int, records: Sequence[RejectedAt]) -> list[Rejected]:
        """Lines of rejects.jsonl for records whose addresses are known; may read the file up to the last record.

        Args:
            source: index of the source.
            records: the records.
        """
        # An address may be a byte offset; the index of the record is known only after counting lines up to it.
        addresses = np.array([record.address for record in records], dtype=np.int64)
        numbers, in_order = self.sources[source].row_numbers(addresses.tolist()), np.argsort(addresses)
        lines = np.zeros(len(records), dtype=np.int64)
        lines[in_order] = self.sources[source].line_numbers(addresses[in_order], np.zeros_like(addresses))
        path = str(self.sources[source].path)
        return [
            Rejected(
                source=path,
                row=row,
                line=line or None,
                id=self.default_id(source, row)
                if at.id in (None, self.default_id(source, at.address))
                else str(at.id),
                reason=at.reason,
                detail=at.detail,
            )
            for row, line, at in zip(numbers, lines.tolist(), records, strict=True)
        ]

    @cached_property
    def _names(self) -> list[str]:
        """Names for default ids: file stems; paths if stems repeat; path@config if two sources read the same file."""
        files = [(source.path, source.reading.config) for source in self.sources]
        once = [path for path, _ in dict.fromkeys(files)]
        stems = [path.name.split(".")[0] for path in once]
        if len(set(stems)) == len(stems):
            return [path.name.split(".")[0] for path, _ in files]
        return [str(path) if len(set(once)) == len(once) else f"{path}@{config}" for path, config in files]


def _check_stored(conversation: Conversation, codec: Codec) -> None:
    """Reject a sample of a group, or with a role, a label or per-token values, for a flavor without them."""
    if codec.stores_tokens:
        return
    found: dict[str, Any] = {
        "several samples": conversation.members,
        "a group": conversation.group,
        "a role": conversation.role,
        "a label": conversation.label,
        f"the per-token values {', '.join(conversation.per_token_values)}": conversation.per_token_values,
    }
    if named := next((name for name, value in found.items() if value), None):
        detail = f"the record has {named}, which {codec.sample_class} does not store; set `sample_class` to {TOKENS}"
        raise RecordError(Reason.UNSUPPORTED_FIELD, detail)


def _without_root(file: MediaReference) -> MediaReference:
    """Remove the root of an absolute path outside it."""
    if file.path is None or not os.path.isabs(file.path):
        return file
    try:
        file.resolved()
    except RecordError as error:
        return replace(file, root=None) if error.reject.reason is Reason.IMAGE_OUTSIDE_ROOT else file
    return file


def raw_id(record: Any) -> str | None:
    """Id in the report of a record that is not a valid conversation; None if the record has no id."""
    ident = record.get("id") if isinstance(record, dict) else None
    return str(ident)[:200] or None if isinstance(ident, str | int | float) else None


@announced("opening the input")
def open_reader(options: InputOptions, work_dir: Path, part: tuple[int, int] | None = None) -> RecordReader:
    """Open the input of a run.

    Args:
        options: options of the run.
        work_dir: folder for converted copies.
        part: (I, N), or None for the complete input.

    Raises:
        SourceError: an input cannot be read.
        ConfigError: the run writes into an input folder.
    """
    refuse_outputs(options.source_configs, options.written)
    ignored: list[IgnoredEntries] = []
    return RecordReader(
        sources=open_sources(
            options.source_configs,
            work_dir=work_dir,
            image_root=options.image_root,
            part=part,
            split=options.source_split,
            seed=options.seed,
            trust_sample_loader=options.trust_sample_loader,
            links=not options.no_links,
            ignored=ignored,
        ),
        ignored_entries=ignored,
        media_root=moved_folders(options.media_root) or moved_here(),
        sample_class=options.sample_class,
        use_patch_positions=options.use_patch_positions,
        layout=options.layout or "",
        part=part[0] if part else None,
        record_weight=options.record_weight,
        group_field=options.group_field,
    )
