"""What a report shows, gathered from a dataset: every shard's counts, a sample of the packs.

What a report says in words: the settings of a dataset, and what in it deserves a look.
"""

import base64
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.vision.images import load_image, read_header
from energon_packed.errors import RecordError
from energon_packed.formats import Codec, codec_for
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.tokens import KINDS, MappedPack, map_pack
from energon_packed.inspection.view import PackView, view_pack
from energon_packed.records import MediaReference
from energon_packed.shards import PackingManifest
from energon_packed.shards.counts import counted_manifest
from energon_packed.shards.reader import ShardReader

_MOST_MEASURED = 20_000  # packs whose lengths are read
_MOST_COUNTED = 1_000  # the same where nothing is recorded, so that packs are read in full
_MOST_MAPPED = 120  # packs in the packing map, whose tokens are counted by kind
_MOST_SHOWN = 40  # packs in the gallery
_MOST_WORST = 10  # packs in the list of the least utilized
_MOST_IMAGES = 1_000  # images whose size is read, from `_MOST_MAPPED` packs at most
_EXAMPLES = 3  # rejects shown of each reason
_THUMBNAIL = 240  # pixels of the longer side
_IMAGE = re.compile(r"img(\d+)_\d+\.(?!npy$)\w+")


@dataclass(frozen=True, slots=True)
class PackSize:
    """What a pack holds, by its lengths and the names of its members.

    Attributes:
        number: of the pack in the dataset.
        key: in the tar.
        shard: name of its tar.
        lengths: tokens of each sample.
        images: images of each sample, S numbers.
    """

    number: int
    key: str
    shard: str
    lengths: Sequence[int]
    images: Sequence[int]

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything on the page, but the blend.

    Attributes:
        path, manifest: of the dataset.
        is_counted: there is no packing.json; the manifest has counts from a scan, and no settings.
        encoder: the one that it was packed with, or None.
        packs: packs there are.
        measured: the packs that were read for the distributions.
        mapped: packs of the map.
        shown: packs of the gallery, with thumbnails as data URLs by member name.
        image_sizes: (width, height) in pixels of images that were read.
        bad_images: images that were read, and have no size.
        not_encoded: why there is no encoder, or an empty text.
        wrong_shards: shards whose size is not the one in packing.json.
        rejects: (reason, count, examples).
    """

    path: Path
    manifest: PackingManifest
    is_counted: bool
    encoder: ChatEncoder | None
    packs: int
    measured: Sequence[PackSize]
    mapped: Sequence[MappedPack]
    shown: Sequence[tuple[PackView, Mapping[str, str]]]
    image_sizes: Sequence[tuple[int, int]]
    bad_images: int
    not_encoded: str
    wrong_shards: Sequence[str]
    rejects: Sequence[tuple[str, int, list[Mapping[str, Any]]]]

    @property
    def is_packed(self) -> bool:
        """A member of a tar is a pack; False for samples that are packed on the fly."""
        return codec_for(self.manifest.sample_class).packed

    @property
    def worst(self) -> Sequence[PackSize]:
        """The packs with the fewest tokens, of those that were read."""
        return sorted(self.measured, key=lambda pack: (pack.tokens, pack.key))[:_MOST_WORST]

    @property
    def token_kinds(self) -> dict[str, int]:
        """Tokens of each kind in the packs of the map; empty without an encoder."""
        if self.encoder is None:
            return {}
        counted = [segment.tokens for pack in self.mapped for segment in pack.segments if segment.tokens]
        return {kind: sum(tokens[kind] for tokens in counted) for kind in KINDS}


def gather(folder: PackedFolder, encoder: ChatEncoder | None, *, not_encoded: str = "", seed: int = 0) -> ReportData:
    """Read what a report needs.

    Args:
        folder: the dataset.
        encoder: tells the kinds of tokens; None leaves them open.
        not_encoded: why there is no encoder.
        seed: which packs are taken where there are too many.

    Raises:
        FormatError: a shard is missing or damaged.
        ConfigError: there is no shard.
    """
    codec, is_counted = folder.codec, folder.manifest is None
    manifest = folder.manifest or counted_manifest(folder.path, codec)
    tars = [folder.path / shard.name for shard in manifest.shards]
    reader = ShardReader(tars)
    rng = np.random.default_rng(seed)
    contents = partial(_counted, encoder=encoder) if is_counted else _recorded
    measured = [
        PackSize(pack, key, reader.tars[reader.locate(pack)[0]].name, lengths, images)
        for pack in _picked(rng, len(reader), _MOST_COUNTED if is_counted else _MOST_MEASURED)
        for key, lengths, images in [contents(reader, pack, codec)]
    ]
    if not manifest.seq_len:  # neither packing.json nor recorded lengths
        manifest = replace(manifest, seq_len=max((pack.tokens for pack in measured), default=0))
    mapped = _picked(rng, len(reader), _MOST_MAPPED)
    shown = _picked(rng, len(reader), _MOST_SHOWN)
    with_images = [pack.number for pack in measured if any(pack.images)]
    sizes, bad_images = _image_sizes(reader, rng.permutation(with_images)[:_MOST_MAPPED].tolist())
    return ReportData(
        path=folder.path,
        manifest=manifest,
        is_counted=is_counted,
        encoder=encoder,
        packs=len(reader),
        measured=measured,
        mapped=[map_pack(reader[pack], codec, encoder, multiple=manifest.pad_multiple) for pack in mapped],
        shown=[_with_thumbnails(reader[pack], codec, encoder) for pack in shown],
        image_sizes=sizes,
        bad_images=bad_images,
        not_encoded=not_encoded,
        wrong_shards=[s.name for s, tar in zip(manifest.shards, tars, strict=True) if tar.stat().st_size != s.bytes],
        rejects=list(_rejects(folder.path.parent / "rejects.jsonl", manifest)),
    )


def _picked(rng: np.random.Generator, count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, rising."""
    return sorted(rng.permutation(count)[:most].tolist()) if count > most else list(range(count))


def _recorded(reader: ShardReader, pack: int, codec: Codec) -> tuple[str, list[int], list[int]]:
    """Key of a pack, recorded tokens and images of each sample; by the names of the members, which are not read."""
    raw: dict[str, Any] = {}
    images: Counter[int] = Counter()
    for member, content in reader.members(pack, only=codec.lengths_part):
        raw.setdefault("__key__", member.key)
        if member.part == codec.lengths_part:
            raw[member.part] = content
        elif (found := _IMAGE.fullmatch(member.part)) is not None:
            images[int(found[1])] += 1
    lengths = [length or 0 for length in codec.lengths(raw)]
    return raw["__key__"], lengths, [images[number] for number in range(len(lengths))]


def _counted(
    reader: ShardReader, pack: int, codec: Codec, encoder: ChatEncoder | None
) -> tuple[str, list[int], list[int]]:
    """As `_recorded` for a pack of another packer: recorded tokens, else measured ones, else 0."""
    raw = reader[pack]
    samples = codec.read(raw)
    lengths = [sample.length for sample in samples]
    if None in lengths and encoder is not None:
        lengths = [one.length for one in encoder.measure([sample.conversation for sample in samples])]
    return raw["__key__"], [max(0, length or 0) for length in lengths], [len(sample.images) for sample in samples]


def _image_sizes(reader: ShardReader, packs: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """(width, height) of at most `_MOST_IMAGES` images of these packs, and how many have none."""
    sizes: list[tuple[int, int]] = []
    bad = 0
    for pack in packs:
        for member, content in reader.members(pack):
            if len(sizes) + bad == _MOST_IMAGES:
                return sizes, bad
            if _IMAGE.fullmatch(member.part) is None:
                continue
            try:
                header = read_header(MediaReference(data=content))
                sizes.append((header.width, header.height))
            except RecordError:
                bad += 1
    return sizes, bad


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


_DIGITS = 12  # of a fingerprint
_LOW_UTILIZATION = 0.9
_VISION = ("image_processor_type", "patch_size", "merge_size", "min_pixels", "max_pixels", "size")
_MOST_NAMED = 5  # names listed in one warning


@dataclass(frozen=True, slots=True)
class SplitRow:
    """What a split was to get, and what its shards hold."""

    name: str
    asked: float | None
    shards: int
    packs: int
    samples: int
    tokens: int


def facts(data: ReportData) -> Iterator[tuple[str, str]]:
    """(name, value) of each setting and measure that is no plain count."""
    m = data.manifest
    yield "supervised tokens", _supervised(data)
    if m.images:
        yield "image sizes", _image_size_facts(data)
    if not data.is_counted:
        yield "tokenizer", _tokenizer(m)
    if not data.is_counted or data.encoder is not None:
        yield "chat template", _template(data)
        yield "image settings", _vision(data)
    if data.is_counted:
        return
    yield "supervised text (loss_on)", str(m.encoder.get("loss_on", "decided by the Processor"))
    if data.is_packed:
        most = "any number" if m.max_samples_per_pack is None else f"at most {m.max_samples_per_pack:,}"
        yield "packing", f"{m.algorithm}, {most} of samples per pack, grouped by {m.group_by}, seed {m.seed}"
    if m.pad_multiple > 1:
        yield "padding", f"every sample is rounded up to a multiple of {m.pad_multiple:,} tokens"
    over = f"samples over seq_len: {m.overlong}"
    if m.truncated:
        over += f"; {m.truncated:,} samples were truncated, {m.tokens_cut:,} tokens were removed"
    yield "overlong", over
    yield "input fingerprint", m.input_fingerprint[:_DIGITS] or "none"


def splits(manifest: PackingManifest) -> list[SplitRow]:
    """Every split that was asked for or has a shard."""
    rows = []
    for name in dict.fromkeys([*manifest.split, *(shard.split for shard in manifest.shards)]):
        shards = [shard for shard in manifest.shards if shard.split == name]
        rows.append(
            SplitRow(
                name=name,
                asked=manifest.split.get(name),
                shards=len(shards),
                packs=sum(shard.packs for shard in shards),
                samples=sum(shard.samples for shard in shards),
                tokens=sum(shard.tokens for shard in shards),
            )
        )
    return rows


def warnings(data: ReportData) -> Iterator[str]:
    """What deserves a look, one sentence each."""
    m = data.manifest
    if data.wrong_shards:
        named = _named(data.wrong_shards, "shard")
        yield f"the size of {named} is not the one in packing.json; run energon-packed verify"
    if m.records > m.packed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count, _ in data.rejects)
        share = _percent(m.records - m.packed, m.records)
        yield f"{m.records - m.packed:,} of {m.records:,} records ({share}) were rejected: {reasons}"
    for row in splits(m):
        if not row.packs and row.asked != 0:
            yield f"split {row.name} has no pack, with a share of {row.asked or 0:g} of {m.packs:,} packs"
    yield from _about_tokens(data)
    if m.unused_fields:
        yield f"no reader uses {_named(list(m.unused_fields), 'field')} of the records; see Fields not used"
    if m.truncated:
        yield f"{m.truncated:,} samples were truncated to seq_len; {m.tokens_cut:,} tokens were removed"
    if data.is_packed and not data.is_counted and m.utilization < _LOW_UTILIZATION:
        yield f"utilization is {m.utilization:.2%}; energon-packed lengths compares other values of seq_len"
    if data.bad_images:
        yield f"{data.bad_images:,} of {data.bad_images + len(data.image_sizes):,} images that were read are damaged"
    if data.not_encoded:
        yield f"the kinds of tokens (image, supervised, other) are not shown: {data.not_encoded}"


def _about_tokens(data: ReportData) -> Iterator[str]:
    problems = [(s, pack.key) for pack in data.mapped for s in pack.segments if s.problem is not None]
    if problems:
        segment, key = problems[0]
        example = f"{segment.id} in {key}: {segment.problem}"
        yield f"{len(problems):,} samples of the map cannot be encoded, such as {example}"
    if bare := [pack.key for pack in data.mapped if pack.supervised == 0]:
        yield f"{_named(bare, 'pack')} of the {len(data.mapped):,} in the map have no supervised token"
    if data.manifest.supervised_tokens == 0:
        yield "no token of the dataset is supervised"


def _supervised(data: ReportData) -> str:
    m = data.manifest
    if m.supervised_tokens is not None:
        return f"{m.supervised_tokens:,} of {m.tokens:,} ({_percent(m.supervised_tokens, m.tokens)})"
    if kinds := data.token_kinds:
        total = sum(kinds.values())
        share = _percent(kinds["supervised"], total)
        return f"{share} of {total:,} tokens in the {len(data.mapped):,} packs of the map; packing.json has no total"
    return "unknown: packing.json has no total, and no tokenizer is at hand"


def _image_size_facts(data: ReportData) -> str:
    sizes = np.array(data.image_sizes)
    if not len(sizes):
        return "none could be read"
    pixels = sizes.prod(axis=1)
    order = np.argsort(pixels, kind="stable")
    places = {"smallest": 0, "median": len(order) // 2, "largest": -1}
    chosen = {name: sizes[order[place]].tolist() for name, place in places.items()}
    listed = ", ".join(f"{name} {width} x {height}" for name, (width, height) in chosen.items())
    return f"{listed} pixels; from {len(sizes):,} of {data.manifest.images:,} images"


def _tokenizer(m: PackingManifest) -> str:
    named = m.encoder.get("tokenizer") or m.encoder.get("processor_class") or "unknown"
    return f"{named} (fingerprint {m.tokenizer_fingerprint[:_DIGITS] or 'none'})"


def _template(data: ReportData) -> str:
    found = data.manifest.template_fingerprint
    if data.encoder is None:
        return f"SHA-256 {found[:_DIGITS]}" if found else "none recorded"
    template = data.encoder.renderer.template
    if template.source is None:
        return "none"
    how = "{% generation %} tags mark" if template.is_tagged else "the texts before and after it mark"
    return f"SHA-256 {template.fingerprint[:_DIGITS]}; {how} what the assistant wrote"


def _vision(data: ReportData) -> str:
    if data.encoder is not None:
        if (vision := data.encoder.vision) is None:
            return "none, text only"
        config = vision.config()["image_processor"]
        return _listed({"family": type(vision).__name__} | {name: config[name] for name in _VISION if name in config})
    given = {k: v for k, v in data.manifest.encoder.items() if k not in ("tokenizer", "loss_on", "processor_class")}
    return _listed(given) if given else "those of the tokenizer folder"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _named(names: Sequence[str], noun: str) -> str:
    listed = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    return f"{len(names):,} {noun}{'' if len(names) == 1 else 's'} ({listed})"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "0%"
