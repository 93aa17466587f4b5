"""Command `energon-packed view`: datasets, a Metadataset or records in, a local page to browse them out."""

import os
import sys
import tempfile
import webbrowser
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from energon_packed.cli.options import (
    GroupedCommand,
    as_options,
    group_option,
    media_root_option,
    options_of,
    set_inputs,
    wrong_usage,
)
from energon_packed.cli.terminal import echo
from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError, EnergonPackedError, FormatError
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.viewer.packs import Viewer
from energon_packed.inspection.viewer.pages import Pages
from energon_packed.inspection.viewer.records import HeaderReader, RecordsViewer
from energon_packed.inspection.viewer.server import ViewServer
from energon_packed.inspection.viewer.several import Several
from energon_packed.metadatasets import is_metadataset, prepared_folder
from energon_packed.options import make
from energon_packed.pipeline.options import InputOptions
from energon_packed.storage import as_path

_COMMON = ("port", "no_browser", "no_token", "tokenizer", "image_root", "map", "media_root", "config")
# Options of a run that change no record.
_OF_RUNS = ("inputs", "media_root", "sample_class", "unpacked", "layout", "algorithm", "max_samples_per_pack",
            "pad_multiple", "seed", "workers", "max_reject_rate")  # fmt: skip


@click.command(name="view", cls=GroupedCommand, common=_COMMON)
@click.argument("paths", nargs=-1, metavar="DIR|METADATASET|INPUT...")
@group_option("--port", type=click.IntRange(0, 65535), default=0, group="Page",
              help="Port on 127.0.0.1. [default: a free port]")  # fmt: skip
@group_option("--no-browser", is_flag=True, group="Page", help="Only print the address.")
@group_option("--no-token", is_flag=True, group="Page",
              help="Also answer requests without the token of the address, for all users of the machine.")  # fmt: skip
@options_of(InputOptions, without=_OF_RUNS, defaults=False)
@media_root_option
def command(paths: tuple[str, ...], port: int, no_browser: bool, no_token: bool, values: dict[str, Any]) -> None:
    """Browse a dataset, a Metadataset, two datasets, or records before packing in a local page.

    The page is read-only, needs no network, and is for this machine only. Ctrl-C ends the command. The input options
    are those of pack, and the tokenizer is the tokenizer in packing.json for datasets.

    \b
    energon-packed view out
    energon-packed view data.jsonl --tokenizer DIR
    energon-packed view mix.yaml
    energon-packed view out-before out-after
    energon-packed view out --port 8000 --no-browser
    """
    with tempfile.TemporaryDirectory(prefix="energon-packed-") as folder:
        pages = _pages(paths, values, Path(folder))
        # Ctrl-C is the usual end, not an interruption.
        with suppress(KeyboardInterrupt), ViewServer(pages, port, token=not no_token) as server:
            echo(f"{server.url}\nCtrl-C ends it.")
            # Without a display, `webbrowser` would start a browser in the terminal.
            if not no_browser and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
                webbrowser.open(server.url)
            server.serve_forever()


def _pages(names: tuple[str, ...], values: dict[str, Any], work_dir: Path) -> Pages:
    tokenizer = None if values.get("tokenizer") is None else Path(values["tokenizer"])

    def opened(path: Path, base: str = "") -> Pages:
        if is_metadataset(path):
            return Several.of_blend(path, opened, base)
        folder = PackedFolder.open(path)
        with suppress(ConfigError) if tokenizer is None else nullcontext():  # without a tokenizer, a page says why
            folder.encoder_loader({} if tokenizer is None else {"tokenizer": tokenizer})
        return Viewer(folder, partial(_encoder, folder, tokenizer), base)

    paths = [as_path(name) for name in names]
    are_datasets = [is_metadataset(path) or _is_packed(path) for path in paths]
    if not any(are_datasets):
        set_inputs(values, names)
        with wrong_usage():
            encoder = {} if tokenizer is not None else {"encoder": HeaderReader()}
            options = make(InputOptions, values | encoder, what="option")
        return RecordsViewer(options, work_dir)
    if others := [name for name in values if name != "tokenizer"]:
        raise click.UsageError(f"--{others[0].replace('_', '-')} is an option for records, got {names[0]}. Omit it.")
    if len(paths) == 1:
        return opened(paths[0])
    if len(paths) != 2 or not all(are_datasets) or any(map(is_metadataset, paths)):
        raise click.UsageError(f"Pass one dataset, one Metadataset, two datasets, or records, got {', '.join(names)}.")
    return Several.of_two(paths[0], paths[1], opened)


def _encoder(folder: PackedFolder, tokenizer: Path | None) -> tuple[ChatEncoder | None, str]:
    """Load the encoder of a dataset; pages show why it cannot be loaded."""
    try:
        encoder, reason = folder.encoder_or_reason(tokenizer)
    except (EnergonPackedError, OSError) as error:  # such as a template that is not Jinja, or a broken link
        encoder, reason = None, str(error)
    return encoder, as_options(reason)


def _is_packed(path: Path) -> bool:
    """Whether a path is a dataset with a known flavor; other Energon datasets are input of `pack`."""
    if prepared_folder(path) is None:
        return False
    folder = PackedFolder.open(path)
    try:
        return folder.manifest is not None or bool(folder.codec)
    except FormatError:
        return False
