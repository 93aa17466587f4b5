"""Whether the files of a dataset are as many and as long as they say, before any of them is read.

Counts of a dataset without packing.json, as other packers leave it: from its indexes and the json of each pack.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import read_yaml
from energon_packed.formats import Codec
from energon_packed.formats.parts import image_count
from energon_packed.metadatasets import NV_META, read_split
from energon_packed.shards.manifest import PackingManifest, ShardEntry
from energon_packed.shards.nv_meta import OLD_INFO
from energon_packed.shards.reader import ShardReader

_OFFSET = 8  # bytes of an entry of .tar.idx: one for each pack, and the end of the last one
_REMEDY = (
    "copy the complete folder again or pack it again; if the change is intended, run energon-packed nv-meta on it"
)


def check_complete(folder: Path, split: str, manifest: PackingManifest | None) -> None:
    """Refuse a dataset that is shorter than it says; the contents of the tars are not read.

    The names, packs and sizes in packing.json and .info.json must be those of split.yaml, of the tars and of their
    indexes. A shard that split.yaml excludes may be missing.

    Args:
        folder: with `.nv-meta`.
        split: the one that is read.
        manifest: its packing.json; None where another tool packed it.

    Raises:
        FormatError: they differ; the message names the file, both numbers and the remedy.
    """
    splits = read_split(folder)
    names = splits.shards(split)
    counts = shard_counts(folder)
    if manifest is not None:
        listed = {shard.name: shard for shard in manifest.shards if shard.split == split}
        if missing := sorted(listed.keys() - set(names) - splits.excluded):
            raise FormatError(
                f"{folder / NV_META / 'split.yaml'} does not have {missing[0]} in split {split!r}, one of "
                f"{len(missing)} shards that packing.json lists there; {_REMEDY}"
            )
        for name in names:
            if name in listed:
                _expect(folder / name, listed[name].bytes, "bytes", "packing.json")
                _expect_packs(folder, counts, name, listed[name].packs, "packing.json")
    for name in names:
        if name in counts:
            _expect_index(folder / name, counts[name])


def shard_counts(folder: Path) -> Mapping[str, int]:
    """Packs of each shard, as Energon reads them; empty where there is none of its files, which it reports itself.

    Raises:
        FormatError: the file is damaged.
    """
    for name in (".info.json", OLD_INFO):
        file = folder / NV_META / name
        if not file.is_file():
            continue
        try:
            value = json.loads(file.read_text(encoding="utf-8")) if name.endswith("json") else read_yaml(file)
            return {str(shard): int(count) for shard, count in value["shard_counts"].items()}
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(f"{file} is damaged: {type(error).__name__} {error}; {_REMEDY}") from error
    return {}


def _expect_packs(folder: Path, counts: Mapping[str, int], name: str, packs: int, by: str) -> None:
    if counts and counts.get(name) != packs:
        raise FormatError(
            f"{folder / NV_META / '.info.json'} counts {counts.get(name, 0)} packs in {name}, {by} {packs}; {_REMEDY}"
        )


def _expect_index(tar: Path, packs: int) -> None:
    index = tar.with_suffix(".tar.idx")
    if index.is_file():  # Energon says so where it is missing
        _expect(index, _OFFSET * (packs + 1), "bytes", f"the {packs} packs of .info.json")


def _expect(file: Path, size: int, unit: str, by: str) -> None:
    try:
        found = file.stat().st_size
    except OSError as error:
        raise FormatError(f"{file}: {error.strerror}; {_REMEDY}") from error
    if found != size:
        raise FormatError(f"{file} has {found} {unit}, and {size} by {by}; {_REMEDY}")


def counted_manifest(folder: Path, codec: Codec) -> PackingManifest:
    """What a scan of the packs tells of a manifest: counts of shards, packs, samples and images.

    Tokens are counted where the packer recorded lengths; `seq_len` is then the longest pack, else 0. Nothing is known
    of rejected records, settings and hashes.

    Raises:
        FormatError: a shard, an index or a pack is missing or damaged.
        ConfigError: there is no shard.
    """
    entries: list[ShardEntry] = []
    longest = images = 0
    is_known = True
    splits = read_split(folder)
    for split in splits.parts:
        for name in splits.shards(split):
            tar = folder / name
            reader = ShardReader([tar])
            samples = tokens = 0
            for pack in range(len(reader)):
                part = reader.part(pack, codec.lengths_part)
                lengths = codec.lengths(part)
                known = [length for length in lengths if length is not None]
                is_known = is_known and len(known) == len(lengths)
                samples, tokens, longest = samples + len(lengths), tokens + sum(known), max(longest, sum(known))
                images += image_count(member.name for member, _ in reader.members(pack, only=""))
            entries.append(
                ShardEntry(
                    name=name, split=split, packs=len(reader), samples=samples, tokens=tokens if is_known else 0,
                    bytes=tar.stat().st_size, sha256="",
                )
            )  # fmt: skip
    if not entries:
        raise ConfigError(f"{folder} has no shards in any split")
    packs, samples = (sum(getattr(entry, name) for entry in entries) for name in ("packs", "samples"))
    tokens = sum(entry.tokens for entry in entries) if is_known else 0
    seq_len = longest if is_known else 0
    return PackingManifest(
        sample_class=codec.sample_class,
        shard_prefix="",
        records=samples,
        packed=samples,
        rejects={},
        packs=packs,
        tokens=tokens,
        images=images,
        seq_len=seq_len,
        algorithm="unknown",
        group_by="unknown",
        seed=0,
        utilization=round(tokens / (packs * seq_len), 6) if packs and seq_len else 0.0,
        pad_multiple=1,
        overlong="unknown",
        tokenizer_fingerprint="",
        input_fingerprint="",
        fingerprint="",
        encoder={},
        shards=entries,
    )
