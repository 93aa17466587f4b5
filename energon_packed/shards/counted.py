"""Counts of a dataset without packing.json, as other packers leave it: from its indexes and the json of each pack."""

from pathlib import Path

from energon_packed.errors import ConfigError
from energon_packed.formats import Codec
from energon_packed.formats.parts import image_count
from energon_packed.metadatasets import read_split
from energon_packed.shards.manifest import PackingManifest, ShardEntry
from energon_packed.shards.reader import ShardReader


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
