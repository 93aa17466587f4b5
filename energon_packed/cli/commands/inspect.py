"""Command `energon-packed inspect`: a tar, a dataset folder, a Metadataset or a pack in, its contents as text out."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from energon_packed.cli.display import shown_path, turn_text
from energon_packed.cli.options import InputPath, as_options, media_root_option
from energon_packed.cli.terminal import SafeConsole, echo_json
from energon_packed.errors import ConfigError, FormatError, first_of
from energon_packed.files import format_bytes, visible
from energon_packed.formats import codec_for
from energon_packed.inspection.blend import BlendEntry, read_blend
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.search import FoundRecord, find_records
from energon_packed.inspection.tokens import token_rows
from energon_packed.inspection.view import (
    PackView,
    SampleView,
    extract_pack,
    view_pack,
)
from energon_packed.metadatasets import NV_META, is_metadataset, read_metadataset
from energon_packed.shards.loading_code import loading_code
from energon_packed.shards.scan import scan_tar

_MAX_TARS = 20  # tars of a folder that are listed
_MAX_FOUND = 20  # samples of --id or --source that are shown
_ROLES = {"system": "magenta", "user": "cyan", "assistant": "blue", "tool": "yellow"}


@click.command(name="inspect")
@click.argument("path", type=InputPath())
@click.option("--pack", "key", metavar="KEY", help="Show only this pack.")
@click.option("--id", "ident", metavar="ID", help="Show only the sample of the record with this id.")
@click.option("--source", "location", metavar="FILE:LINE",
              help="Show only the sample of this record; FILE:ROW of tables and folders of images.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=1, show_default=True, help="Number of packs to show.")
@click.option("--tokens", is_flag=True, help="Show packs token by token, with label, position and sample.")
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Tokenizer used to mark supervised text. [default: tokenizer in packing.json]")  # fmt: skip
@click.option("--extract", type=InputPath(file_okay=False), metavar="DIR",
              help="Write the members of the shown packs to DIR/KEY/.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, one per tar, pack or dataset.")
@media_root_option
def command(
    path: Path,
    key: str | None,
    ident: str | None,
    location: str | None,
    limit: int,
    tokens: bool,
    tokenizer: Path | None,
    extract: Path | None,
    as_json: bool,
) -> None:
    """Show the contents of a tar, a dataset folder or a Metadataset YAML.

    Supervised text is green. The code of the dataset is not executed, and media are not decoded.

    \b
    energon-packed inspect out/webdataset/out-000000.tar
    energon-packed inspect out --pack out_00000007 --tokens
    energon-packed inspect out --source data.jsonl:18
    energon-packed inspect mix.yaml
    """
    console = SafeConsole(highlight=False, markup=False)
    chosen = [flag for flag, value in (("--pack", key), ("--id", ident), ("--source", location)) if value is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} must not be combined. Pass one of them.")
    if is_metadataset(path):
        if chosen or tokens or extract is not None:
            used = chosen[0] if chosen else "--tokens and --extract"
            raise click.UsageError(f"{path} is a Metadataset. Use {used} with one of its datasets.")
        _show_blend(console, path, as_json)
        return
    folder = PackedFolder.of_tars(path)
    found = find_records(folder, ident=ident, location=location) if {"--id", "--source"} & {*chosen} else ()
    problems: list[str] = []
    if not chosen:
        listed = [folder.path / shard.name for shard in folder.manifest.shards] if folder.manifest else []
        missing = [] if folder.tar else sorted({*listed} - {*folder.tars})
        tars = [*missing, *folder.tars]
        for tar in tars[:_MAX_TARS]:
            problems += _show_tar(console, tar, as_json)
        if len(tars) > _MAX_TARS:
            console.print(f"and {len(tars) - _MAX_TARS:,} more tars")
        if not as_json and (folder.path / NV_META).is_dir():
            _show_manifest(console, folder)
    if found:
        folder = replace(folder, tar=None)  # the sample may be in another tar of the dataset
        shown = [folder.pack(str(record.pack)) for record in found[:_MAX_FOUND]]
    else:
        shown = [folder.pack(key)] if key is not None else list(folder.first(limit))
    if extract is not None:
        # All members are checked before the first file is written.
        folder.check_extractable()
    # Turns are shown without an encoder too, for third-party datasets and on machines without the tokenizer.
    encoder, problem = folder.encoder_or_reason(tokenizer) if shown else (None, "")
    if problem and tokens:
        raise ConfigError(problem)
    if problem and not as_json:
        console.print(f"supervised text is not marked: {as_options(problem)}\n", soft_wrap=True)
    for raw, record in zip_longest(shown, found[: len(shown)]):
        # Without packing.json, the flavor is detected for each pack.
        view = view_pack(raw, codec_for(folder.manifest.sample_class) if folder.manifest else None, encoder)
        if tokens:
            _show_tokens(console, raw, encoder, view, as_json, record)
        elif record is not None:
            _show_found(console, view, record, as_json)
        elif as_json:
            echo_json(view.as_dict())
        else:
            _show_pack(console, view, folder.manifest.seq_len if folder.manifest else None)
        if extract is not None:
            written = extract_pack(raw, extract)
            console.print(f"{len(written)} files in {written[0].parent}", soft_wrap=True)
    if len(found) > len(shown):
        console.print(f"and {len(found) - len(shown):,} more samples")
    if problems:
        raise FormatError(first_of(problems, "problem"))


def _show_tar(console: Console, tar: Path, as_json: bool) -> list[str]:
    """Show a tar; return its problems with its path."""
    try:
        scan = scan_tar(tar)
    except FormatError as error:
        if as_json:
            echo_json({"tar": str(tar), "packs": 0, "members": 0, "parts": {}, "problems": [str(error)]})
        else:
            console.print(f"✗ {error}", style="red", soft_wrap=True)
        return [str(error)]
    problems = [f"{tar}: {problem}" for problem in scan.problems]
    # Sizes by kind of part show at a glance what fills a tar.
    kinds: dict[str, list[int]] = defaultdict(list)
    for member in scan.members:
        kinds[_kind(member.part)].append(member.size)
    packs = len({member.key for member in scan.members})
    if as_json:
        parts = {kind: {"members": len(sizes), "bytes": sum(sizes)} for kind, sizes in kinds.items()}
        value = {"tar": str(tar), "packs": packs, "members": len(scan.members), "parts": parts}
        echo_json(value | {"problems": scan.problems})
        return problems
    size = format_bytes(tar.stat().st_size)
    console.print(f"{tar}: {packs:,} packs, {len(scan.members):,} members, {size}", style="bold", soft_wrap=True)
    for kind, sizes in sorted(kinds.items()):
        console.print(f"  {kind:16} {len(sizes):>9,} x {format_bytes(sum(sizes) / len(sizes)):>10}")
    for problem in scan.problems:
        console.print(f"  ✗ {problem}", style="red", soft_wrap=True, markup=False)
    return problems


def _kind(part: str) -> str:
    """Group media parts by extension: `img*.jpg` for `img3_0.jpg`."""
    name, _, extension = part.rpartition(".")
    return f"{name[:3]}*.{extension}" if name.startswith(("img", "vid")) else part or "(no part)"


def _show_manifest(console: Console, folder: PackedFolder) -> None:
    manifest = folder.manifest
    if manifest is None:
        console.print("no packing.json: packed by a third-party tool; lengths may be unknown\n")
        return
    rejected = sum(manifest.rejects.values())
    console.print(
        f"{manifest.sample_class}, {manifest.packed:,} samples in {manifest.packs:,} packs of {manifest.seq_len:,} "
        f"tokens, {manifest.utilization:.2%} full, {manifest.samples_per_pack:.2f} samples a pack, "
        f"{rejected:,} of {manifest.records:,} records rejected\n",
        soft_wrap=True,
    )
    if code := loading_code(manifest, folder.path):
        console.print("load it in Python:\n" + "\n".join(code) + "\n", soft_wrap=True)


def _show_pack(console: Console, view: PackView, seq_len: int | None) -> None:
    tokens = view.tokens
    filled = f", {tokens / seq_len:.2%} of {seq_len:,}" if tokens is not None and seq_len else ""
    count = "lengths not recorded" if tokens is None else f"{tokens:,} tokens{filled}"
    console.print(f"{view.key}  {view.sample_class}  {len(view.samples)} samples, {count}", style="bold", markup=False)
    for part, shape in view.shapes.items():
        console.print(f"  {part}  {shape}", markup=False)
    for index, sample in enumerate(view.samples):
        _show_sample(console, index, sample)
    console.print()


def _show_found(console: Console, view: PackView, record: FoundRecord, as_json: bool) -> None:
    sample, index = record.sample_in(view), int(record.sample or 0)
    spans = sample.supervised_spans
    if as_json:
        echo_json(asdict(record) | {"supervised_spans": spans, "content": sample.as_dict()})
        return
    console.print(f"{record.place}, {record.status}", style="bold", markup=False, soft_wrap=True)
    console.print(f"sample {index} of {len(view.samples)} in {view.key}, {record.shard}", markup=False, soft_wrap=True)
    _show_sample(console, index, sample)
    if spans is not None:
        listed = ", ".join(f"[{start:,}, {stop:,})" for start, stop in spans)
        console.print(f"  supervised tokens of the sample: {listed or 'none'}", style="green", soft_wrap=True)
    console.print()


def _show_sample(console: Console, index: int, sample: SampleView) -> None:
    span = ""
    if sample.length is not None:
        span = f"  {sample.length:,} tokens"
        if sample.start is not None:
            span += f" [{sample.start:,}, {sample.start + sample.length:,})"
    if sample.supervised is not None:
        span += f", {sample.supervised:,} supervised"
    if sample.truncated_to is not None:
        span += f", truncated to {sample.truncated_to:,}: the end of its text is not in the row"
    if sample.group is not None:
        span += f", group {sample.group}"
    if sample.role is not None:
        span += f", {sample.role}"
    if sample.label is not None:
        span += f", label {' '.join(f'{value:g}' for value in sample.label)}"
    console.print(f"── {index}  {sample.id or '(no id)'}{span}", style="dim", markup=False)
    for _, _, file in sample.media:
        place = "" if file.file is None else f", {file.file} from byte {file.offset:,}"
        shown = f"  {file.name}  {file.text}, {format_bytes(file.bytes)}{place}"
        console.print(shown, style="blue", markup=False, soft_wrap=True)
    for turn in sample.turns:
        line = Text(turn_text(turn.role, turn.shown), style="green" if turn.supervised else "")
        line.stylize(_ROLES.get(turn.role, "white"), 0, 12)
        console.print(line)


def _show_tokens(
    console: Console,
    raw: Mapping[str, Any],
    encoder: Any,
    view: PackView,
    as_json: bool,
    record: FoundRecord | None = None,
) -> None:
    rows = token_rows(raw, encoder, codec_for(view.sample_class))
    if record is not None and record.sample_in(view):
        rows = [row for row in rows if row.segment == record.sample]
    if as_json:
        for row in rows:
            fields = {name: value for name in row.__slots__ if (value := getattr(row, name)) is not None}
            echo_json({"key": view.key, **fields})
        return
    console.print(view.key, style="bold", markup=False)
    names = ["index", "sample", "token", "text", "label", "position"]
    table = Table(*names, *rows[0].values, box=None)
    for row in rows:
        position = " ".join(map(str, row.position))
        values = [_values(value) for value in row.values.values()]
        style = "green" if row.label >= 0 else ""
        table.add_row(str(row.index), str(row.segment), str(row.token), Text(visible(row.text)), str(row.label),
                      position, *values, style=style)  # fmt: skip
    console.print(table)


def _values(value: Any) -> str:
    return " ".join([f"{number:g}" for number in value]) if isinstance(value, list) else f"{value:g}"


def _show_blend(console: Console, path: Path, as_json: bool) -> None:
    metadataset = read_metadataset(path)
    entries = [entry for split in read_blend(metadataset) for entry in split.entries]
    if as_json:
        for entry in entries:
            value = {name: getattr(entry, name) for name in entry.__slots__}
            echo_json(value | {"path": str(entry.path)})
    else:
        _show_entries(console, entries)
    # The entries that can be read are shown before the error.
    if problems := metadataset.all_leaves()[1] or [entry.problem for entry in entries if entry.problem]:
        raise ConfigError(first_of(problems, "problem"))


def _show_entries(console: Console, entries: Sequence[BlendEntry]) -> None:
    table = Table("split")
    table.add_column("dataset", overflow="fold", min_width=20)
    for name in ("weight", "packs", "samples", "share", "seen"):
        table.add_column(name, justify="right")
    for entry in entries:
        share = "" if entry.share is None else f"{entry.share:.2%}"
        seen = "" if entry.times is None else f"{entry.times:.2f}"
        packs, samples = ("?" if count is None else f"{count:,}" for count in (entry.packs, entry.samples))
        number = f"{entry.number:g}" + (" x" if entry.mode == "repetitions" else "")
        table.add_row(entry.split, shown_path(entry.path), number, packs, samples, share, seen)
    console.print(table)
    for entry in entries:
        if entry.problem:
            console.print(f"✗ {entry.problem}", style="red", soft_wrap=True, markup=False)
