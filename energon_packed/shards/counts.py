"""Counts of a dataset. Input: a dataset folder. Output: an error if files are missing or cut, or a counted manifest.

check_complete     compares packing.json, .info.json, split.yaml and file sizes before any tar is read
shard_counts       packs of each shard by .info.json
counted_manifest   counts of a third-party dataset without packing.json, from its indexes and JSON parts
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG

import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import of_type, read_if_there, read_yaml
from energon_packed.formats import Codec
from energon_packed.formats.parts import audio_count, image_count, video_count
from energon_packed.formats.references import MEDIA_PART, located_names
from energon_packed.metadatasets import NV_META, SplitFile, read_split
from energon_packed.shards.manifest import PackingManifest, ShardEntry
from energon_packed.shards.nv_meta import OLD_INFO
from energon_packed.shards.reader import ShardReader
from energon_packed.system import raise_resource_error

_OFFSET = 8  # bytes of an entry of .tar.idx, which has the offset of each pack and the end of the last pack
_REMEDY = (
    "copy the complete folder again or pack it again; if the change is intended, run energon-packed nv-meta on it"
)


def check_complete(
    folder: Path,
    split: str,
    splits: SplitFile,
    manifest: PackingManifest | None,
    counts: Mapping[str, int],
    found: Mapping[Path, os.stat_result],
) -> None:
    """Refuse a dataset with fewer shards, packs or bytes than it declares; the contents of the tars are not read.

    The names, packs and sizes in packing.json and .info.json must agree with split.yaml, the tars and their indexes. A
    shard that split.yaml excludes may be missing.

    Args:
        folder: folder with `.nv-meta`.
        split: the split to be read.
        splits: split.yaml of the folder.
        manifest: packing.json of the folder; None for a third-party dataset.
        counts: `shard_counts` of the folder.
        found: `statuses` of the tars of the split and of their indexes.

    Raises:
        FormatError: they differ; the message has the file, both counts and the remedy.
    """
    names = splits.shards(split)
    indexes = {name: (folder / name).with_suffix(".tar.idx") for name in names}
    if manifest is not None:
        listed = {shard.name: shard for shard in manifest.shards if shard.split == split}
        if missing := sorted(listed.keys() - set(names) - splits.excluded):
            raise FormatError(
                f"{folder / NV_META / 'split.yaml'} does not have {missing[0]} in split {split!r}, one of "
                f"{len(missing)} shards that packing.json lists there; {_REMEDY}"
            )
        # A shard that packing.json does not list is checked by .info.json alone.
        for name in names:
            if name in listed:
                packs = listed[name].packs
                _expect_size(folder / name, found, listed[name].bytes, "packing.json")
                if counts and counts.get(name) != packs:
                    raise FormatError(
                        f"{folder / NV_META / '.info.json'} counts {counts.get(name, 0)} packs in {name}, "
                        f"packing.json {packs}; {_REMEDY}"
                    )
    for name in names:
        index = found.get(indexes[name])  # if it is missing, Energon raises an error
        if name in counts and index is not None and S_ISREG(index.st_mode):
            _expect_size(indexes[name], found, _OFFSET * (counts[name] + 1), f"the {counts[name]} packs of .info.json")


def shard_counts(folder: Path) -> Mapping[str, int]:
    """Return the number of packs of each shard, as Energon reads it; {} if the file is missing, which Energon reports.

    Raises:
        FormatError: the file is damaged.
    """
    # Energon 7 writes and reads .info.json; earlier versions have .info.yaml.
    for name in (".info.json", OLD_INFO):
        file = folder / NV_META / name
        try:
            if (content := read_if_there(file)) is None:
                continue
            value = json.loads(content.decode()) if name.endswith("json") else read_yaml(file)
            counts = of_type(of_type(value, dict)["shard_counts"], dict)
            return {str(shard): of_type(count, int, str(shard)) for shard, count in counts.items()}
        except (OSError, ValueError, yaml.YAMLError, KeyError, RecursionError) as error:
            raise_resource_error(error, file)
            raise FormatError(f"{file} is damaged: {type(error).__name__} {error}; {_REMEDY}") from error
    return {}


def _expect_size(file: Path, found: Mapping[Path, os.stat_result], size: int, by: str) -> None:
    try:
        actual = (found.get(file) or file.stat()).st_size
    except OSError as error:
        raise_resource_error(error, file)
        raise FormatError(f"{file}: {error.strerror}; {_REMEDY}") from error
    if actual != size:
        raise FormatError(f"{file} has {actual} bytes, and {size} by {by}; {_REMEDY}")


def counted_manifest(folder: Path, codec: Codec) -> PackingManifest:
    """Return a manifest with counts of shards, packs, samples and images, from a scan of the packs.

    If the packer recorded lengths, tokens are counted and `seq_len` is the longest pack; otherwise both are 0.
    Rejected records, settings and hashes stay empty, as the packs do not have them.

    Raises:
        FormatError: a shard, an index or a pack is missing or damaged.
        ConfigError: no split has a shard.
    """
    entries: list[ShardEntry] = []
    longest = images = videos = audios = 0
    has_lengths = True
    splits = read_split(folder)
    for split in splits.parts:
        for name in splits.shards(split):
            tar = folder / name
            reader = ShardReader([tar])
            samples = tokens = 0
            for pack in range(len(reader)):
                wanted = (codec.lengths_part, MEDIA_PART)
                members = list(reader.members(pack, only=wanted))  # headers, and the contents of these two parts
                parts = {member.part: content for member, content in members}
                lengths = codec.lengths({"__key__": members[0][0].key, **parts})
                known = [length for length in lengths if length is not None]
                has_lengths = has_lengths and len(known) == len(lengths)
                samples, tokens, longest = samples + len(lengths), tokens + sum(known), max(longest, sum(known))
                names = {*parts, *located_names(parts)}
                images, videos = images + image_count(names), videos + video_count(names)
                audios += audio_count(names)
            entries.append(
                ShardEntry(
                    name=name, split=split, packs=len(reader), samples=samples, tokens=tokens if has_lengths else 0,
                    bytes=tar.stat().st_size, sha256="",
                )
            )  # fmt: skip
    if not entries:
        raise ConfigError(f"{folder} has no shards in any split")
    packs, samples = (sum(getattr(entry, name) for entry in entries) for name in ("packs", "samples"))
    tokens = sum(entry.tokens for entry in entries) if has_lengths else 0
    seq_len = longest if has_lengths else 0
    return PackingManifest(
        sample_class=codec.sample_class,
        shard_prefix="",
        records=samples,
        packed=samples,
        rejects={},
        packs=packs,
        tokens=tokens,
        images=images,
        videos=videos,
        audios=audios,
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
