"""Compare two packed datasets: two PackedFolders in, the differences of their counts and settings out."""

from collections.abc import Iterator, Mapping
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.inspection.folder import PackedFolder
from energon_packed.shards import PackingManifest

_COUNTS = (
    "records", "packed", "rejected", "truncated", "tokens_cut", "records_split", "fragments", "packs", "shards",
    "bytes", "utilization", "samples_per_pack", "tokens", "supervised_tokens", "images", "videos", "frames",
)  # fmt: skip
_SETTINGS = (
    "tool_version", "sample_class", "layout", "shard_prefix", "seq_len", "algorithm", "max_samples_per_pack",
    "group_by", "seed", "split", "pad_multiple", "overlong", "media", "media_check", "extract_frames", "check_media",
    "template_fingerprint", "tokenizer_fingerprint", "input_fingerprint",
)  # fmt: skip
_OF_SOURCES = ("image_root", "map", "adapter", "source_split", "weight")
_FOLDERS = ("tokenizer", "processor")
_DIGITS = 12  # characters shown of a fingerprint


Rows = list[tuple[str, ...]]
"""(name, value of the first, value of the second run), and the change of numbers; "" if they are equal or unknown."""


def compare(one: PackedFolder, other: PackedFolder) -> dict[str, Rows]:
    """Compare the manifests of two runs.

    Returns:
        By heading, all counts that are not 0 in both, the rejected records by reason, the records and packed records
        of each source, the unused fields, the notes, and the settings that differ.

    Raises:
        ConfigError: a third-party tool packed one of the datasets.
    """
    first, second = _manifest(one), _manifest(other)
    return {
        "Counts": list(_differences(_counts(first), _counts(second))),
        "Rejected records": list(_differences(first.rejects, second.rejects)),
        "Sources": list(_differences(_sources(first), _sources(second))),
        "Fields not used": list(_differences(first.unused_fields, second.unused_fields)),
        "Notes": list(_differences(first.notes, second.notes)),
        "Settings that differ": list(_settings(first, second)),
    }


def _manifest(folder: PackedFolder) -> PackingManifest:
    if folder.manifest is None:
        raise ConfigError(
            f"{folder.path} must have a packing.json to be compared. Pass the output of two runs of pack."
        )
    return folder.manifest


def _counts(manifest: PackingManifest) -> dict[str, float | None]:
    counts = {
        "rejected": sum(manifest.rejects.values()),
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }
    return {name.replace("_", " "): counts.get(name, getattr(manifest, name, None)) for name in _COUNTS}


def _sources(manifest: PackingManifest) -> dict[str, int]:
    """Records and packed records of each source, by a name with its path."""
    counts: dict[str, int] = {}
    for source in manifest.sources:
        for name, count in (("records", source.records), ("packed", source.packed)):
            key = f"{', '.join(source.path)}, {name}"
            counts[key] = counts.get(key, 0) + count
    return counts


def _differences(first: Mapping[str, float | None], second: Mapping[str, float | None]) -> Iterator[tuple[str, ...]]:
    """Yield the numbers that are not 0 in both; None is unknown."""
    for name in dict.fromkeys([*first, *second]):
        before, after = first.get(name, 0), second.get(name, 0)
        if before is None or after is None:
            values = ("unknown" if value is None else f"{value:,}" for value in (before, after))
            yield name, *values, ""
        elif name == "utilization":
            change = f"{100 * (after - before):+.2f} points" if after != before else ""
            yield name, f"{before:.2%}", f"{after:.2%}", change
        elif before or after:
            shown = ",.2f" if isinstance(before + after, float) else ","
            change = f"{after - before:+{shown}}" + (f" ({(after - before) / before:+.2%})" if before else "")
            yield name, f"{before:{shown}}", f"{after:{shown}}", change if after != before else ""


def _settings(first: PackingManifest, second: PackingManifest) -> Iterator[tuple[str, ...]]:
    pairs = [(name, getattr(first, name), getattr(second, name)) for name in _SETTINGS]
    pairs += [(name, _of_sources(first, name), _of_sources(second, name)) for name in _OF_SOURCES]
    names = dict.fromkeys([*first.encoder, *second.encoder])
    if first.tokenizer_fingerprint == second.tokenizer_fingerprint != "":
        names = {name: None for name in names if name not in _FOLDERS}  # the same content in another folder
    pairs += [(name, first.encoder.get(name), second.encoder.get(name)) for name in names]
    if first.image_settings and second.image_settings:
        images = dict.fromkeys([*first.image_settings, *second.image_settings])
        pairs += [
            (f"images: {name}", first.image_settings.get(name), second.image_settings.get(name)) for name in images
        ]
    for name, before, after in pairs:
        if before != after:
            yield name, _shown(name, before), _shown(name, after)


def _of_sources(manifest: PackingManifest, name: str) -> str:
    """Values of a per-source setting, each once, in the order of the sources."""
    values = [_shown(name, getattr(source, name)) for source in manifest.sources]
    return ", ".join(dict.fromkeys(values))


def _shown(name: str, value: Any) -> str:
    if value is None or value == "":
        return "not set"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one:g}" for key, one in value.items()) or "not set"
    return str(value)[:_DIGITS] if name.endswith("_fingerprint") else str(value)
