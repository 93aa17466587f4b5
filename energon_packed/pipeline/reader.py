"""RecordReader: the records of all sources as conversations, read the same way in every stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.formats import codec_for
from energon_packed.pipeline.options import AUTO, CAPTIONING, InputOptions, part_suffix
from energon_packed.pipeline.rejects import Rejected
from energon_packed.records import Conversation, normalize
from energon_packed.sources import Source, SourceRecord, open_sources


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """Reads records of all sources as conversations.

    Attributes:
        sources: the input.
        sample_class: flavor that will hold the conversations; those it cannot hold are rejected. `auto` holds all.
        use_patch_positions: False ignores the .npy files that records name.
        layout: stricter form of the flavor, or "".
        part: number of the part of the input, or None for all of it.
    """

    sources: Sequence[Source]
    sample_class: str
    use_patch_positions: bool
    layout: str = ""
    part: int | None = None

    def conversation(self, source: int, row: SourceRecord) -> Conversation:
        """A record as a conversation; `id` is None where the record has none.

        Raises:
            RecordError: the record cannot be used.
        """
        try:
            return self._conversation(source, row)
        except RecursionError:
            raise RecordError(Reason.BAD_JSON, "its objects and lists are nested too deeply to be read") from None

    def _conversation(self, source: int, row: SourceRecord) -> Conversation:
        reading = self.sources[source].reading
        if reading.fraction < 1:
            reading.check_sampled(row.address)
        if row.reject is not None:
            raise RecordError.of(row.reject)
        record = row.record
        if reading.adapter is not None:
            record = reading.adapter.apply(record)
        if reading.field_map is not None and not isinstance(record, Conversation):
            record = reading.field_map.apply(record)
        if isinstance(record, Conversation):
            conversation = record
        else:
            if not self.use_patch_positions and isinstance(record, Mapping) and "patch_positions" in record:
                record = {name: value for name, value in record.items() if name != "patch_positions"}
            conversation = normalize(record, image_root=self.sources[source].image_root)
        if reading.copy and conversation.id is not None:
            conversation = conversation.named(reading.named(conversation.id))
        if conversation.patch_positions and not self.use_patch_positions:
            conversation = replace(conversation, patch_positions=())
        if self.sample_class != AUTO:  # the widest flavor holds everything
            codec = codec_for(self.sample_class, self.layout)
            codec.check(conversation)
            conversation = codec.fitted(conversation)
        return conversation

    def fits_captioning(self, conversation: Conversation) -> bool:
        """Whether PackedCaptioningSample holds it; only asked before `auto` is resolved."""
        if self.sample_class != AUTO:
            return True
        try:
            codec_for(CAPTIONING).check(conversation)
        except RecordError:
            return False
        return True

    def read(self, source: int, address: int, size: int) -> Conversation:
        """The record at an address, as `conversation` reads it."""
        return self.conversation(source, self.sources[source].read(address, size))

    def default_id(self, source: int, row: int) -> str:
        """Name of a record that has none: its file, the part of it, and its number there."""
        return self.sources[source].reading.named(f"{self._names[source]}{part_suffix(self.part)}:{row}")

    def rejected(self, source: int, records: Sequence[tuple[int, str | None, str, str]]) -> list[Rejected]:
        """Lines of rejects.jsonl for records whose addresses are known; may read their file up to the last one.

        Args:
            source: number of the source.
            records: address, id, reason and detail of each; the id is None, or made of the address, if it has none.
        """
        numbers = self.sources[source].row_numbers([address for address, *_ in records])
        path = str(self.sources[source].path)
        return [
            Rejected(
                source=path,
                row=row,
                id=self.default_id(source, row) if ident in (None, self.default_id(source, address)) else str(ident),
                reason=reason,
                detail=detail,
            )
            for row, (address, ident, reason, detail) in zip(numbers, records, strict=True)
        ]

    @cached_property
    def _names(self) -> list[str]:
        """Stems of the files; their paths, where two have the same stem, and numbers, where two are read from one."""
        files = [(source.path, source.reading.config) for source in self.sources]
        once = [path for path, _ in dict.fromkeys(files)]
        stems = [path.name.split(".")[0] for path in once]
        if len(set(stems)) == len(stems):
            return [path.name.split(".")[0] for path, _ in files]
        return [str(path) if len(set(once)) == len(once) else f"{path}@{config}" for path, config in files]


def raw_id(record: Any) -> str | None:
    """The id in the report of a record that cannot be read as a conversation; None if it has none."""
    ident = record.get("id") if isinstance(record, dict) else None
    return str(ident)[:200] if isinstance(ident, str | int | float) else None


def open_reader(options: InputOptions, work_dir: Path, part: tuple[int, int] | None = None) -> RecordReader:
    """The reader of the input of a run.

    Args:
        options: of the run.
        work_dir: folder for converted copies.
        part: (I, N), or None for all of the input.

    Raises:
        SourceError: an input that cannot be read.
    """
    return RecordReader(
        sources=open_sources(
            options.source_configs,
            work_dir=work_dir,
            image_root=options.image_root,
            part=part,
            split=options.source_split,
            seed=options.seed,
            trust_sample_loader=options.trust_sample_loader,
        ),
        sample_class=options.sample_class,
        use_patch_positions=options.use_patch_positions,
        layout=options.layout or "",
        part=part[0] if part else None,
    )
