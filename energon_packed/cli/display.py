"""Format results for the terminal: a PackResult, DryRun, Survey or turn in, a rich table, JSON values or lines out."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from energon_packed.files import format_bytes, visible
from energon_packed.pipeline import DryRun, PackResult
from energon_packed.pipeline.survey import Survey
from energon_packed.shards import PackingManifest
from energon_packed.shards.nv_meta import SPLITS

_MAX_COUNTS = 10  # field names and notes listed in the summary table
_MAX_NAME = 60  # characters shown of a field name
_MAX_TURN = 2000  # characters shown of a turn


def result_table(result: PackResult, steps: int | None, ranks: Mapping[str, int]) -> Table:
    """Build the summary table of a run.

    Args:
        result: result of `pack`.
        steps: steps of one epoch; None if on-the-fly packing decides them.
        ranks: `world_size`, `micro_batch_size` and `num_workers` of these steps.
    """
    manifest = result.manifest
    table = _table()
    rejected = sum(manifest.rejects.values())
    table.add_row("records", f"{manifest.records:,}")
    table.add_row("packed", f"{manifest.packed:,}")
    if manifest.truncated:
        table.add_row("  truncated", f"{manifest.truncated:,}")
        table.add_row("  tokens truncated", f"{manifest.tokens_cut:,}")
    if manifest.records_split:
        title, unit = ("of several samples", "samples") if manifest.groups else ("split", "fragments")
        table.add_row(f"  {title}", f"{manifest.records_split:,} into {manifest.fragments:,} {unit}")
    table.add_row("rejected", f"{rejected:,} ({rejected / max(manifest.records, 1):.2%})")
    _add_rejects(table, manifest.rejects)
    for title, counts, unit in _not_used(manifest):
        _add_counts(table, title, counts, unit)
    table.add_section()
    table.add_row("packs" if manifest.algorithm != "none" else "samples to pack on the fly", f"{manifest.packs:,}")
    table.add_row("tokens", f"{manifest.tokens:,}")
    if manifest.groups:
        table.add_row("groups of samples", f"{manifest.groups:,}")
    table.add_row("images", f"{manifest.images:,}")
    by_header = manifest.images - manifest.images_decoded
    for name, count in (("checked by header", by_header), ("checked by decoding", manifest.images_decoded)):
        if count:
            table.add_row(f"  {name}", f"{count:,}")
    if manifest.videos:
        table.add_row("videos", f"{manifest.videos:,}")
        table.add_row("  selected frames", f"{manifest.frames:,}")
        table.add_row(f"  {_video_check(manifest)}", f"{manifest.videos:,}")
    if manifest.audio_seconds:  # of audio files, and of tracks of videos
        table.add_row("audio files", f"{manifest.audios:,}")
        table.add_row("  hours" if manifest.audios else "  hours of tracks", f"{manifest.audio_seconds / 3600:,.2f}")
    if manifest.audios:
        table.add_row(f"  {_audio_check(manifest)}", f"{manifest.audios:,}")
    if stored := manifest.media_stored:
        table.add_row("  stored in media", f"{stored['images']:,} ({format_bytes(stored['bytes'])})")
    table.add_row("seq_len", f"{manifest.seq_len:,}")
    if manifest.algorithm != "none":
        table.add_row("utilization", f"{manifest.utilization:.2%}")
        if result.utilization_ungrouped is not None:
            lost = 100 * (result.utilization_ungrouped - manifest.utilization)
            table.add_row(f"  lost by --group-by {manifest.group_by}", f"{lost:.2f} points")
        table.add_row("samples per pack", f"{manifest.samples_per_pack:.2f}")
    table.add_section()
    splits = {shard.split for shard in manifest.shards} | set(result.splits)
    # Without --split, all packs are in train, and the number of packs is already shown.
    if splits != {"train"}:
        for split in (name for name in SPLITS if name in splits):
            table.add_row(f"packs in {split}", f"{manifest.packs_in(split):,}")
    table.add_row("shards", f"{len(manifest.shards):,}")
    table.add_row("size", format_bytes(result.bytes))
    if manifest.tokenizer_engine:
        table.add_row("tokenizer engine", manifest.tokenizer_engine)
    for stage, seconds in result.seconds.items():
        table.add_row(f"{stage} seconds", f"{seconds:.2f}")
    table.add_section()
    if steps is None:
        return table
    table.add_row(
        f"steps per epoch\n  world size {ranks['world_size']}, micro batch {ranks['micro_batch_size']},\n"
        f"  {ranks['num_workers']} loader workers",
        f"{steps:,}",
    )
    return table


def result_dict(result: PackResult, steps: int | None) -> dict[str, Any]:
    """Build the object of `pack --json`: paths, times, steps of an epoch and the manifest."""
    manifest = result.manifest
    return {
        "shards": str(result.shards),
        "lengths": str(result.lengths),
        "rejects": str(result.rejects),
        "bytes": result.bytes,
        "seconds": result.seconds,
        "packs_by_split": {split: manifest.packs_in(split) for split in result.splits},
        "steps_per_epoch": steps,
        "manifest": manifest.as_dict(),
    }


def dry_run_table(result: DryRun) -> Table:
    """Build the table of `pack --dry-run`; counts that are extrapolated from a sample start with "about"."""
    about = "about " if result.sampled else ""
    table = _table()
    table.add_row("input files", f"{len(result.files):,} ({format_bytes(result.input_bytes)})")
    table.add_row("to measure", f"{result.to_measure:.0%} ({format_bytes(result.to_measure * result.input_bytes)})")
    table.add_row("measured before, reused", f"{1 - result.to_measure:.0%}")
    if result.sampled:
        table.add_row("records sampled for this table", f"{result.sampled:,}")
    table.add_section()
    table.add_row("records", f"{about}{result.records:,}")
    rejected = sum(result.rejects.values())
    table.add_row("rejected", f"{about if rejected else ''}{rejected:,}")
    _add_rejects(table, result.rejects, about)
    table.add_section()
    for name in ("packs", "tokens", "shards"):
        table.add_row(name, f"{about}{getattr(result, name):,}")
    table.add_row("size of the shards", f"about {format_bytes(result.num_bytes)}")
    table.add_row("free disk space", format_bytes(result.free_bytes))
    return table


def _table() -> Table:
    """Create a table with a column of names and a column of values."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    return table


def _add_rejects(table: Table, rejects: Mapping[str, int], about: str = "") -> None:
    for reason, count in sorted(rejects.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(f"  {reason}", f"{about}{count:,}")


def _not_used(result: PackingManifest | DryRun | Survey) -> list[tuple[str, Mapping[str, int], str]]:
    """List (title, counts by name, unit) of unused fields, notes and ignored entries, if there are any."""
    ignored = {entries.reason: entries.count for entries in result.ignored_entries}
    rows = [("fields not used", result.unused_fields, "records"), ("notes", result.notes, "records")]
    return [row for row in (*rows, ("not read as input", ignored, "entries")) if row[1]]


def _add_counts(table: Table, title: str, counts: Mapping[str, int], unit: str) -> None:
    """Add a section with the most common names; its last row counts the names that are not listed."""
    table.add_section()
    table.add_row(title, unit)
    for name, count in list(counts.items())[:_MAX_COUNTS]:
        table.add_row(f"  {_printable(name)}", f"{count:,}")
    if len(counts) > _MAX_COUNTS:
        table.add_row("  others, in packing.json", f"{len(counts) - _MAX_COUNTS:,} more")


def unused_lines(result: DryRun | Survey) -> Iterator[str]:
    """List unused fields, notes and ignored entries, a line each: `notes: 40 x several answers; and 3 more`."""
    for title, counts, _ in _not_used(result):
        shown = [f"{count:,} x {_printable(name)}" for name, count in list(counts.items())[:_MAX_COUNTS]]
        shown += [f"and {len(counts) - _MAX_COUNTS:,} more"] if len(counts) > _MAX_COUNTS else []
        yield f"{title}: {'; '.join(shown)}"


def turn_text(role: str, text: str) -> str:
    """Format a turn as `  user      What is it?`, with later lines indented; long text is shortened."""
    shown = text if len(text) <= _MAX_TURN else f"{text[:_MAX_TURN]} … ({len(text):,} characters)"
    return f"  {role:9} " + visible(shown).replace("\n", f"\n{' ' * 12}")


def _video_check(manifest: PackingManifest) -> str:
    if manifest.check_media == "full":
        return "checked by decoding"
    return "checked by decoding the selected frames" if manifest.extract_frames else "checked by packets"


def _audio_check(manifest: PackingManifest) -> str:
    return "checked by decoding" if manifest.check_media == "full" else "checked by header and packets"


def _printable(name: str) -> str:
    """Shorten a name to one line of 60 characters; control characters become escapes, as names come from records."""
    shown = visible(name, keep="")
    return shown if len(shown) <= _MAX_NAME else f"{shown[: _MAX_NAME - 1]}…"


def shown_path(path: str | Path) -> str:
    """Shorten a path inside the current folder to its relative path; Energon resolves the paths of a Metadataset."""
    return str(path).removeprefix(f"{Path.cwd()}/")
