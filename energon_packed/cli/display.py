"""The closing table of a run, counts and sizes as text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from energon_packed.files import visible
from energon_packed.pipeline import DryRun, PackResult
from energon_packed.pipeline.survey import Survey
from energon_packed.shards.nv_meta import SPLITS

_MOST_COUNTED = 10  # field names in the closing table
_LONGEST_NAME = 60
_LONGEST_TURN = 2000  # characters that are shown


def result_table(result: PackResult, steps: Sequence[int], place: Mapping[str, int]) -> Table:
    """The closing table of a run.

    Args:
        result: of the run.
        steps: of each rank in one epoch; none where packing on the fly decides them.
        place: the ranks and workers that they are for.
    """
    manifest = result.manifest
    table = _table()
    rejected = sum(manifest.rejects.values())
    table.add_row("records", f"{manifest.records:,}")
    table.add_row("packed", f"{manifest.packed:,}")
    if manifest.truncated:
        table.add_row("  truncated", f"{manifest.truncated:,}")
        table.add_row("  tokens truncated", f"{manifest.tokens_cut:,}")
    table.add_row("rejected", f"{rejected:,} ({rejected / max(manifest.records, 1):.2%})")
    _add_rejects(table, manifest.rejects)
    _add_counts(table, "fields not used", manifest.unused_fields)
    _add_counts(table, "notes", manifest.notes)
    table.add_section()
    table.add_row("packs" if manifest.algorithm != "none" else "samples to pack on the fly", f"{manifest.packs:,}")
    table.add_row("tokens", f"{manifest.tokens:,}")
    table.add_row("images", f"{manifest.images:,}")
    if manifest.images_decoded is not None:
        by_header = manifest.images - manifest.images_decoded
        for name, count in (("checked by header", by_header), ("checked by decoding", manifest.images_decoded)):
            if count:
                table.add_row(f"  {name}", f"{count:,}")
    table.add_row("seq_len", f"{manifest.seq_len:,}")
    if manifest.algorithm != "none":
        table.add_row("utilization", f"{manifest.utilization:.2%}")
        if result.utilization_ungrouped is not None:
            lost = 100 * (result.utilization_ungrouped - manifest.utilization)
            table.add_row(f"  lost by --group-by {manifest.group_by}", f"{lost:.2f} points")
        table.add_row("samples per pack", f"{manifest.samples_per_pack:.2f}")
    table.add_section()
    splits = {shard.split for shard in manifest.shards} | set(result.splits)
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
    if not steps:
        return table
    spread = f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,} by rank"
    table.add_row(
        f"steps per epoch\n  world size {place['world_size']}, micro batch {place['micro_batch_size']},\n"
        f"  {place['num_workers']} loader workers",
        spread,
    )
    return table


def result_dict(result: PackResult, steps: Sequence[int]) -> dict[str, Any]:
    """What `pack --json` prints: paths, times, steps of each rank and the manifest."""
    manifest = result.manifest
    return {
        "shards": str(result.shards),
        "lengths": str(result.lengths),
        "rejects": str(result.rejects),
        "bytes": result.bytes,
        "seconds": result.seconds,
        "packs_by_split": {split: manifest.packs_in(split) for split in result.splits},
        "steps_per_epoch": steps,
        "manifest": asdict(manifest),
    }


def dry_run_table(found: DryRun) -> Table:
    """What `pack --dry-run` prints; numbers from a sample are marked."""
    about = "about " if found.sampled else ""
    table = _table()
    table.add_row("input files", f"{len(found.files):,} ({format_bytes(found.input_bytes)})")
    table.add_row("to measure", f"{found.to_measure:.0%} ({format_bytes(found.to_measure * found.input_bytes)})")
    table.add_row("measured before, reused", f"{1 - found.to_measure:.0%}")
    if found.sampled:
        table.add_row("records sampled for this table", f"{found.sampled:,}")
    table.add_section()
    table.add_row("records", f"{about}{found.records:,}")
    rejected = sum(found.rejects.values())
    table.add_row("rejected", f"{about if rejected else ''}{rejected:,}")
    _add_rejects(table, found.rejects, about)
    table.add_section()
    for name in ("packs", "tokens", "shards"):
        table.add_row(name, f"{about}{getattr(found, name):,}")
    table.add_row("size of the shards", f"about {format_bytes(found.num_bytes)}")
    table.add_row("free disk space", format_bytes(found.free_bytes))
    return table


def _table() -> Table:
    """Two columns: names and values."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    return table


def _add_rejects(table: Table, rejects: Mapping[str, int], about: str = "") -> None:
    for reason, count in sorted(rejects.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(f"  {reason}", f"{about}{count:,}")


def _add_counts(table: Table, title: str, counts: Mapping[str, int]) -> None:
    """A section with a row per text, the most common first; the last row counts those that are not shown."""
    if not counts:
        return
    table.add_section()
    table.add_row(title, "records")
    for text, count in list(counts.items())[:_MOST_COUNTED]:
        table.add_row(f"  {printable(text)}", f"{count:,}")
    if len(counts) > _MOST_COUNTED:
        table.add_row("  others, in packing.json", f"{len(counts) - _MOST_COUNTED:,} more")


def unread_lines(found: DryRun | Survey) -> Iterator[str]:
    """`fields not used: url 40, source 40, and 3 more`, and the same for notes, where there are any."""
    for title, counts in (("fields not used", found.unused_fields), ("notes", found.notes)):
        shown = [f"{printable(text)} {count:,}" for text, count in list(counts.items())[:_MOST_COUNTED]]
        shown += [f"and {len(counts) - _MOST_COUNTED:,} more"] if len(counts) > _MOST_COUNTED else []
        if shown:
            yield f"{title}: {', '.join(shown)}"


def turn_text(role: str, text: str) -> str:
    """`  user      What is it?`, further lines of the text below its first one; the end of a long text is left out."""
    shown = text if len(text) <= _LONGEST_TURN else f"{text[:_LONGEST_TURN]} … ({len(text):,} characters)"
    return f"  {role:9} " + visible(shown).replace("\n", f"\n{' ' * 12}")


def printable(text: str) -> str:
    """At most 60 characters of one line, control characters as escapes: names come from the data."""
    shown = visible(text, keep="")
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…"


def format_bytes(count: float) -> str:
    """`1.5 GiB` and the like."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
