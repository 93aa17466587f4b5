"""What a report says in words: the settings of a dataset, and what in it deserves a look."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packed.inspection.report_data import ReportData
from energon_packed.shards import PackingManifest

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
        yield "image sizes", _image_sizes(data)
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


def _image_sizes(data: ReportData) -> str:
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
