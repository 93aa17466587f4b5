"""Terminal output of a run: a bar per stage, then a table."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from energon_packed.pipeline import PackResult
from energon_packed.pipeline.progress import Progress as BuildProgress
from energon_packed.shards import steps_per_epoch
from energon_packed.shards.nv_meta import SPLITS

_MOST_COUNTED = 10  # field names in the closing table
_LONGEST_NAME = 60


class TerminalProgress(BuildProgress):
    """A bar with rate and time left for each stage; one line per stage where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._stage = self._unit = ""
        self._total = self._units = self._records = 0

    def start(self, stage: str, total: int, unit: str) -> None:
        """Draw a new bar."""
        self._stage, self._unit, self._total = stage, unit, total
        self._units = self._records = 0
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:8}"),
                BarColumn(bar_width=32),
                TextColumn("{task.percentage:>3.0f}%  {task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(stage, total=max(total, 1), note="")
            self._bar.start()

    def advance(self, units: int, records: int = 0) -> None:
        """Move the bar."""
        self._units += units
        self._records += records
        if self._bar is not None:
            elapsed = self._bar.tasks[0].elapsed or 0.0
            rate = f", {self._records / elapsed:,.0f}/s" if elapsed > 0.5 and self._records else ""
            self._bar.update(self._task, completed=self._units, note=f"{self._count():,} {self._unit}{rate}")

    def finish(self, seconds: float) -> None:
        """Replace the bar by one line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        count = self._count()
        rate = f"{count / seconds:>12,.0f}/s" if seconds > 0 and count else ""
        self._console.print(f"{self._stage:8} {count:>12,} {self._unit:8} {seconds:>8.1f} s {rate}", highlight=False)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _count(self) -> int:
        return self._records or self._units


def result_table(result: PackResult, *, world_size: int, micro_batch_size: int, num_workers: int) -> Table:
    """The closing table of a run."""
    manifest = result.manifest
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rejected = sum(manifest.rejects.values())
    table.add_row("records", f"{manifest.records:,}")
    table.add_row("packed", f"{manifest.packed:,}")
    if manifest.truncated:
        table.add_row("  truncated", f"{manifest.truncated:,}")
        table.add_row("  tokens truncated", f"{manifest.tokens_cut:,}")
    table.add_row("rejected", f"{rejected:,} ({rejected / max(manifest.records, 1):.2%})")
    for reason, count in sorted(manifest.rejects.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(f"  {reason}", f"{count:,}")
    _add_counts(table, "fields not used", manifest.unused_fields)
    _add_counts(table, "notes", manifest.notes)
    table.add_section()
    table.add_row("packs" if manifest.algorithm != "none" else "samples to pack on the fly", f"{manifest.packs:,}")
    table.add_row("tokens", f"{manifest.tokens:,}")
    table.add_row("images", f"{manifest.images:,}")
    table.add_row("seq_len", f"{manifest.seq_len:,}")
    if manifest.algorithm != "none":
        table.add_row("utilization", f"{manifest.utilization:.2%}")
        if result.mixed_utilization is not None:
            lost = 100 * (result.mixed_utilization - manifest.utilization)
            table.add_row(f"  lost by --group-by {manifest.group_by}", f"{lost:.2f} points")
        table.add_row("samples per pack", f"{manifest.samples_per_pack:.2f}")
    table.add_section()
    splits = {shard.split for shard in manifest.shards} | set(result.splits)
    if splits != {"train"}:
        for split in (name for name in SPLITS if name in splits):
            table.add_row(f"packs in {split}", f"{manifest.packs_in(split):,}")
    table.add_row("shards", f"{len(manifest.shards):,}")
    table.add_row("size", format_bytes(result.bytes))
    for stage, seconds in result.seconds.items():
        table.add_row(f"{stage} seconds", f"{seconds:.2f}")
    table.add_section()
    if manifest.algorithm == "none":  # packing on the fly decides the steps
        return table
    steps = steps_per_epoch(
        manifest, world_size=world_size, micro_batch_size=micro_batch_size, num_workers=num_workers
    )
    spread = f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,} by rank"
    table.add_row(
        f"steps per epoch\n  world size {world_size}, micro batch {micro_batch_size},\n  {num_workers} loader workers",
        spread,
    )
    return table


def _add_counts(table: Table, title: str, counts: Mapping[str, int]) -> None:
    """A section with a row per text, the most common first; the last row counts those that are not shown."""
    if not counts:
        return
    table.add_section()
    table.add_row(title, f"{len(counts):,}")
    for text, count in list(counts.items())[:_MOST_COUNTED]:
        table.add_row(f"  {printable(text)}", f"{count:,}")
    if len(counts) > _MOST_COUNTED:
        table.add_row("  others, in packing.json", f"{len(counts) - _MOST_COUNTED:,} more")


def listed_counts(counts: Mapping[str, int]) -> str:
    """`url 40, source 40, and 3 more`."""
    shown = [f"{printable(text)} {count:,}" for text, count in list(counts.items())[:_MOST_COUNTED]]
    more = [f"and {len(counts) - _MOST_COUNTED:,} more"] if len(counts) > _MOST_COUNTED else []
    return ", ".join(shown + more)


def printable(text: str) -> str:
    """At most 60 characters of one line, control characters as escapes: names come from the data."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…"


def format_bytes(count: float) -> str:
    """`1.5 GiB` and the like."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
