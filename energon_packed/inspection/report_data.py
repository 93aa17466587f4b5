"""What a report shows, gathered from a dataset: every shard's counts, a sample of the packs."""

import base64
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.images import load_image
from energon_packed.errors import ConfigError, EnergonPackedError, FormatError, RecordError
from energon_packed.formats import Codec, codec_for
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.tokens import token_rows
from energon_packed.inspection.view import PackView, view_pack
from energon_packed.records import MediaReference
from energon_packed.shards import PackingManifest
from energon_packed.shards.reader import ShardReader

_MOST_MEASURED = 20_000  # packs whose lengths are read
_MOST_MAPPED = 120  # packs in the packing map
_MOST_SHOWN = 40  # packs in the gallery
_MOST_ENCODED = 40  # packs whose tokens are counted by kind
_EXAMPLES = 3  # rejects shown of each reason
_THUMBNAIL = 240  # pixels of the longer side


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedPack:
    """One row of the packing map: its key, and (id, first token, tokens, kind) of each sample."""

    key: str
    segments: Sequence[tuple[str, int, int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything on the page, but the blend.

    Attributes:
        path, manifest: of the dataset.
        packs: packs there are.
        measured: packs that `pack_tokens`, `pack_samples` and `lengths` were read from.
        pack_tokens, pack_samples: tokens and samples of each pack that was read.
        lengths: tokens of each sample in them.
        mapped: packs of the map.
        shown: packs of the gallery, with thumbnails as data URLs by member name.
        token_kinds: text, image and supervised tokens of `encoded` packs; empty without an encoder.
        encoded: packs that were encoded.
        not_encoded: why none was, or an empty text.
        rejects: (reason, count, examples).
    """

    path: Path
    manifest: PackingManifest
    packs: int
    measured: int
    pack_tokens: list[int]
    pack_samples: list[int]
    lengths: list[int]
    mapped: list[MappedPack]
    shown: list[tuple[PackView, Mapping[str, str]]]
    token_kinds: Mapping[str, int]
    encoded: int
    not_encoded: str
    rejects: list[tuple[str, int, list[Mapping[str, Any]]]]

    @property
    def is_packed(self) -> bool:
        """A member of a tar is a pack; False for samples that are packed on the fly."""
        return codec_for(self.manifest.sample_class).packed


def gather(folder: PackedFolder, encoder: ChatEncoder | None, *, not_encoded: str = "", seed: int = 0) -> ReportData:
    """Read what a report needs.

    Args:
        folder: the dataset.
        encoder: counts tokens by kind; None skips that.
        not_encoded: why there is no encoder.
        seed: which packs are taken where there are too many.

    Raises:
        FormatError: a shard is missing or damaged.
    """
    manifest = folder.manifest
    if manifest is None:
        raise FormatError(
            f"{folder.path} has no packing.json, which a report needs; inspect and verify work without one"
        )
    reader = ShardReader([folder.path / shard.name for shard in manifest.shards])
    rng = np.random.default_rng(seed)
    picked = _picked(rng, len(reader), _MOST_MEASURED)
    codec = codec_for(manifest.sample_class)
    sizes = [[n or 0 for n in codec.lengths(reader.part(pack, codec.lengths_part))] for pack in picked]
    mapped = _picked(rng, len(reader), _MOST_MAPPED)
    shown = _picked(rng, len(reader), _MOST_SHOWN)
    encoded = _picked(rng, len(reader), _MOST_ENCODED) if encoder is not None else []
    return ReportData(
        path=folder.path,
        manifest=manifest,
        packs=len(reader),
        measured=len(picked),
        pack_tokens=[sum(lengths) for lengths in sizes],
        pack_samples=[len(lengths) for lengths in sizes],
        lengths=[length for lengths in sizes for length in lengths],
        mapped=[_map(view_pack(reader[pack], codec)) for pack in mapped],
        shown=[_with_thumbnails(reader[pack], codec, encoder) for pack in shown],
        token_kinds=_token_kinds([reader[pack] for pack in encoded], encoder, codec) if encoder else {},
        encoded=len(encoded),
        not_encoded=not_encoded,
        rejects=list(_rejects(folder.path.parent / "rejects.jsonl", manifest)),
    )


def encoder_or_reason(folder: PackedFolder, tokenizer: Path | None) -> tuple[ChatEncoder | None, str]:
    """The encoder of the dataset, or why it is not available; one that is named must be the right one."""
    try:
        return folder.load_encoder(tokenizer), ""
    except ConfigError as error:
        if tokenizer is not None:
            raise
        return None, str(error)


def _picked(rng: np.random.Generator, count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, rising."""
    return sorted(rng.permutation(count)[:most].tolist()) if count > most else list(range(count))


def _map(view: PackView) -> MappedPack:
    segments = []
    for sample in view.samples:
        segments.append((str(sample.id), sample.start or 0, sample.length or 0, sample.kind))
    return MappedPack(key=view.key, segments=segments)


def _with_thumbnails(
    raw: Mapping[str, Any], codec: Codec, encoder: ChatEncoder | None
) -> tuple[PackView, Mapping[str, str]]:
    view = view_pack(raw, codec, encoder)
    names = [image.name for sample in view.samples for image in sample.images if image.problem is None]
    return view, {name: url for name in names if (url := _thumbnail(raw[name])) is not None}


def _thumbnail(data: bytes) -> str | None:
    try:
        image = load_image(MediaReference(data=data))
    except RecordError:
        return None
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def _token_kinds(raws: list[dict[str, Any]], encoder: ChatEncoder, codec: Codec) -> dict[str, int]:
    kinds: dict[str, int] = defaultdict(int)
    for raw in raws:
        try:
            rows = token_rows(raw, encoder, codec)
        except EnergonPackedError:
            continue
        for row in rows:
            is_image = row.token == encoder.image_token_id
            kinds["image" if is_image else "supervised text" if row.label >= 0 else "other text"] += 1
    return dict(kinds)


def _rejects(file: Path, manifest: PackingManifest) -> Iterator[tuple[str, int, list[Mapping[str, Any]]]]:
    examples: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    if file.is_file():
        with file.open("rb") as stream:
            for line in stream:
                value = orjson.loads(line)
                if len(examples[value["reason"]]) < _EXAMPLES:
                    examples[value["reason"]].append(value)
                if all(len(examples[reason]) >= min(_EXAMPLES, n) for reason, n in manifest.rejects.items()):
                    break
    for reason, count in sorted(manifest.rejects.items(), key=lambda item: -item[1]):
        yield reason, count, examples[reason]
