"""PackingManifest: counts, settings and shard hashes of a dataset. Input and output: `.nv-meta/packing.json`.

The file contains no timestamps or host names. Builds of the same input differ at most in `counters` and
`tokenizer_engine`, which describe the work of the run, and in the paths in `encoder` and `sources`.

A manifest is untrusted when it is read: `_typed` checks that every value has the declared type and is within limits.
"""

import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import orjson

from energon_packed.errors import FormatError, IgnoredEntries
from energon_packed.files import atomic_write, check_inner, of_type, read_if_there, visible
from energon_packed.formats import CODECS
from energon_packed.metadatasets import NV_META, prepared_folder
from energon_packed.records.fields import is_number
from energon_packed.storage import as_path
from energon_packed.version import FORMAT_VERSION, __version__

if TYPE_CHECKING:
    from energon_packed.encoding import ChatEncoder

FILE_NAME = "packing.json"
T = TypeVar("T")
_LARGEST = 2**63 - 1
_LONGEST = 2**31 - 1  # tokens in a row: cu_seqlens are int32
_MOST_ENTRIES = 1000  # of a mapping, such as counts by reason, of which `pack` writes at most 201
_MOST_SHOWN = 60  # characters of a value in a message


class OtherVersionError(FormatError):
    """The manifest has another format version; its dataset must not be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """Manifest entry of a shard.

    Attributes:
        name: file name.
        split: `train`, `val` or `test`.
        packs, samples, tokens: totals of the shard.
        bytes: size of the tar.
        sha256: hex digest of the tar.
    """

    name: str
    split: str
    packs: int
    samples: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """Manifest entry of an input: its settings and its totals.

    Attributes:
        path: files, globs or folders; `(others)` for all inputs past the first 200.
        image_root, map, adapter, source_split: per-source settings; None if the input has no such setting.
        weight: repetition factor; 0.5 samples half of the records.
        files: files that were read.
        records: their records, counted once per repetition; `packed` of them are in packs, as `tokens` tokens.
    """

    path: list[str]
    image_root: str | None = None
    map: str | None = None
    adapter: str | None = None
    source_split: str | None = None
    weight: float = 1.0
    files: int
    records: int
    packed: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingManifest:
    """Counts and settings of a packed dataset.

    packing.json has every field; without audio, it has no fields of audio, and without groups no `groups`. The other
    defaults are of datasets without packing.json, whose packs are counted.

    Attributes:
        sample_class: flavor in `energon_packed.flavors`.
        layout: stricter variant of the flavor that was written, or None.
        dataset_module: package whose sample class dataset.yaml names, or None for energon-packed.
        records: input records; `rejects` counts the records that are not packed by reason.
        packed: samples in all packs: packed records, with each fragment of a split record as a separate sample.
        unused_fields: records with each field that is not read, by field name, the most common first.
        notes: records with each note of the reader, such as an image without a placeholder.
        ignored_entries: entries of input folders that are not read, by reason.
        max_samples_per_pack: maximum samples per pack, or None.
        truncated: packed samples that were truncated to seq_len; `tokens_cut` tokens were removed.
        records_split: packed records that are several samples, `fragments` in sum: longer than seq_len and split, or a
            group of samples.
        groups: groups of at least two samples that share a row; not written without groups.
        packs, tokens, images: totals over all shards; frames of videos are not images, and tokens exclude padding.
        videos, frames: video files, and their selected frames, over all shards.
        audios, audio_seconds: audio files, and seconds of audio with the tracks of videos that are used, over all
            shards; not written without audio.
        extract_frames: packs have the frames of the videos as images, in place of the files.
        images_decoded: images whose pixels were decoded when they were measured; other images were checked by header
            and structure.
        check_media: `header`, or `full`, which decodes all images.
        supervised_tokens: tokens that are targets; None if the encoder does not count them.
        weight_checksum: sum of the `EncodedSample.weight_checksum` of the packed records, modulo 2**63; 0 if all
            loss weights are 1, and no record has columns.
        seq_len: tokens per row.
        utilization: tokens / (packs * seq_len).
        split: requested share of the packs by split.
        pad_multiple: sample lengths were rounded up to a multiple of this many tokens.
        overlong: handling of samples longer than seq_len: drop, error or truncate.
        media: `copy`, images are in the tars; or `reference`, packs have the location of their images.
        media_stored: `images` and `bytes` of the images that are stored in the folder `media`, each once, because they
            are in no file of the input; {} without such images.
        media_check: value of each reference that readers compare: `digest` of the bytes, or `time` of change.
        template_fingerprint: SHA-256 of the chat template's Jinja source; "" without one.
        image_settings: settings of the images by name, as JSON; {} without a vision family.
        tokenizer_fingerprint: digest of tokenizer, template, and settings of images, videos and text.
        input_fingerprint: digest of the input files.
        tokenizer_engine: implementation used in this run, `tokenizers` or `fastokens`; "" without tokenization.
        encoder: options to recreate the encoder.
        counters: records that were `measured`; of them, records that were `tokenized`, which are fewer if some are
            rejected before (such as invalid JSON) or have tokens already; records whose length an earlier run had
            measured (`reused`); `shards_written`, and `shards_reused` from an earlier run.
        loading_code: lines of Python that load the dataset; `path` is its folder. They are for people: nothing runs or
            prints them, and commands make them again from the settings.
        sources: all inputs, in order.
        shards: all tars, in order.

    Examples:
        >>> manifest = PackingManifest.load(Path("demo-out/webdataset"))
        >>> manifest.packs, manifest.packed, manifest.seq_len, manifest.rejects["bad_role"]
        (12, 154, 2048, 1)
    """

    format_version: int = FORMAT_VERSION
    tool_version: str = __version__
    sample_class: str
    layout: str | None = None
    dataset_module: str | None = None
    shard_prefix: str
    records: int
    packed: int
    truncated: int = 0
    tokens_cut: int = 0
    records_split: int = 0
    fragments: int = 0
    groups: int = 0
    rejects: dict[str, int]
    unused_fields: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    ignored_entries: list[IgnoredEntries] = field(default_factory=list)
    packs: int
    tokens: int
    supervised_tokens: int | None = None
    weight_checksum: int = 0
    images: int
    videos: int = 0
    frames: int = 0
    audios: int = 0
    audio_seconds: float = 0.0
    extract_frames: bool = False
    images_decoded: int = 0
    check_media: str = "header"
    seq_len: int
    algorithm: str
    max_samples_per_pack: int | None = None
    group_by: str
    seed: int
    utilization: float
    split: dict[str, float] = field(default_factory=dict)
    pad_multiple: int
    overlong: str
    media: str = "copy"
    media_check: str = "digest"
    media_stored: dict[str, int] = field(default_factory=dict)
    template_fingerprint: str = ""
    image_settings: dict[str, str] = field(default_factory=dict)
    tokenizer_fingerprint: str
    input_fingerprint: str
    fingerprint: str
    tokenizer_engine: str = ""
    encoder: dict[str, Any]
    loading_code: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    sources: list[SourceEntry] = field(default_factory=list)
    shards: list[ShardEntry]

    @property
    def samples_per_pack(self) -> float:
        """Mean number of samples in a pack."""
        return self.packed / self.packs if self.packs else 0.0

    def packs_in(self, split: str) -> int:
        """Return the number of packs in `split`."""
        return sum(shard.packs for shard in self.shards if shard.split == split)

    def encoder_differences(self, encoder: "ChatEncoder") -> list[str]:
        """Describe how an encoder with another fingerprint differs from the encoder of the packs."""
        return encoder.differences(
            self.encoder,
            template=self.template_fingerprint,
            fingerprint=self.tokenizer_fingerprint,
            images=self.image_settings,
        )

    def as_dict(self) -> dict[str, Any]:
        """Content of packing.json; a dataset without audio has no fields of audio, and without groups no `groups`."""
        absent = [] if self.audios or self.audio_seconds else ["audios", "audio_seconds"]
        absent += [] if self.groups else ["groups"]
        return {name: value for name, value in asdict(self).items() if name not in absent}

    def save(self, folder: Path) -> None:
        """Write `.nv-meta/packing.json` of a shard folder."""
        content = orjson.dumps(self.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        atomic_write(folder / NV_META / FILE_NAME, content)

    @classmethod
    def load(cls, path: str | Path) -> "PackingManifest":
        """Read the manifest of a shard folder, or of an output folder with a shard folder `webdataset`.

        Raises:
            FormatError: the manifest is missing, invalid or of another version.
        """
        root = as_path(path)
        if root.is_file():
            raise FormatError(f"{root} is a file; pass a single dataset folder")
        if (manifest := cls.load_if_there(prepared_folder(root) or root)) is None:
            raise FormatError(f"{root} has no {NV_META}/{FILE_NAME}; pass a folder written by energon-packed")
        return manifest

    @classmethod
    def load_if_there(cls, folder: Path) -> "PackingManifest | None":
        """Read the manifest of a shard folder; None if there is no packing.json, as in third-party datasets.

        Raises:
            FormatError: the manifest is invalid or of another version.
        """
        file = folder / NV_META / FILE_NAME
        content = read_if_there(file)
        return None if content is None else cls._parse(file, content)

    @classmethod
    def _parse(cls, file: Path, content: bytes) -> "PackingManifest":
        try:
            value = of_type(orjson.loads(content), dict)
            written = of_type(value["format_version"], int, "format_version")
            if written != FORMAT_VERSION:  # before `_typed`, which would report the unknown fields of another version
                raise OtherVersionError(
                    f"{file} has format version {written}, and this release reads version {FORMAT_VERSION}. Use the "
                    "release of energon-packed that packed the data, or pack the data again."
                )
            # Not written without audio, or without groups.
            manifest = _typed(cls, {"audios": 0, "audio_seconds": 0.0, "groups": 0, **value})
            check_inner(shard.name for shard in manifest.shards)
        except (KeyError, ValueError) as error:
            if isinstance(error, FormatError):  # a ValueError, too: it has its message already
                raise
            reason = visible(str(error))
            raise FormatError(
                f"{file} is not a packing manifest: {reason}. Copy it again, or pack the data again."
            ) from error
        # Values that later code uses as names or sizes, which would fail there with an unrelated error.
        if manifest.sample_class not in CODECS:
            raise FormatError(
                f"{file} names the unknown sample class {visible(manifest.sample_class)!r}, and not one of "
                f"{', '.join(CODECS)}; copy it again or pack the data again"
            )
        for name, number in (("seq_len", manifest.seq_len), ("pad_multiple", manifest.pad_multiple)):
            if not 1 <= number <= _LONGEST:
                raise FormatError(f"{file}: {name} must be from 1 to {_LONGEST}, got {number}; pack the data again")
        return manifest


def _typed(cls: type[T], value: Any, location: str = "") -> T:
    """Convert untrusted JSON to a dataclass of numbers, strings, lists, mappings and dataclasses.

    Args:
        cls: the dataclass. A field of type `Any` accepts a number, a string, true, false or null.
        value: parsed JSON.
        location: path of the value in the file, for messages.

    Raises:
        ValueError: a field is missing, unknown or of another type, or a number is negative, not finite, or needs more
            than 63 bits.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{location or 'the content'} is {_shown(value)}, not an object")
    hints = _hints(cls)  # type: ignore[arg-type]
    known = hints.keys()
    if unknown := sorted(value.keys() - known):
        raise ValueError(f"{location or 'it'} has an unknown field {_shown(unknown[0])}")
    if missing := sorted(known - value.keys()):
        raise ValueError(f"{location or 'it'} has no field {missing[0]!r}")
    return cls(**{name: _value(hints[name], item, f"{location}.{name}".lstrip(".")) for name, item in value.items()})


@cache
def _hints(cls: Any) -> dict[str, Any]:
    """Types of the fields of a dataclass by name, which thousands of shards have."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _value(kind: Any, value: Any, location: str) -> Any:
    """Convert a value to the declared type `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    # Unions are `X | None`; dataclasses of manifests have no other unions.
    if origin is UnionType:
        if value is None and NoneType in arguments:
            return None
        return _value(next(argument for argument in arguments if argument is not NoneType), value, location)
    if is_dataclass(kind):
        return _typed(kind, value, location)  # type: ignore[arg-type]
    if origin in (list, dict):
        if not isinstance(value, origin):
            raise ValueError(f"{location} is {_shown(value)}, not {'a list' if origin is list else 'an object'}")
        if origin is list:
            return [_value(arguments[0], item, f"{location}[{index}]") for index, item in enumerate(value)]
        if len(value) > _MOST_ENTRIES:
            raise ValueError(f"{location} must have at most {_MOST_ENTRIES:,} entries, got {len(value):,}")
        return {name: _value(arguments[1], item, f"{location}.{_shown(name)}") for name, item in value.items()}
    if kind is Any:
        if isinstance(value, dict | list):
            raise ValueError(f"{location} is {_shown(value)}, not a number or a string")
        return _bounded(value, location) if isinstance(value, int | float) else value
    # JSON has one type of number: an integer is a valid float, and true is not a number.
    if not (is_number(value) if kind is float else type(value) is kind):
        raise ValueError(f"{location} is {_shown(value)}, not {kind.__name__}")
    return _bounded(value, location) if is_number(value) else value


def _bounded(value: float, location: str) -> float:
    if not math.isfinite(value) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{location} must be from 0 to {_LARGEST}, got {value}")
    return value


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | NoneType) else type(value).__name__
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
