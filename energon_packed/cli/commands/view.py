"""Command `energon-packed view`: a dataset in, a local page to browse it out."""

import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path

import click

from energon_packed.cli.options import InputPath, as_options, media_root_option
from energon_packed.cli.terminal import echo
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.server import ViewServer
from energon_packed.inspection.viewer import Viewer


@click.command(name="view")
@click.argument("path", type=InputPath(), metavar="DIR")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1. [default: a free port]")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@click.option("--no-token", is_flag=True,
              help="Also answer requests without the token of the address, for all users of the machine.")  # fmt: skip
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Tokenizer used to show tokens and supervised text. "
              "[default: tokenizer in packing.json]")  # fmt: skip
@media_root_option
def command(path: Path, port: int, no_browser: bool, no_token: bool, tokenizer: Path | None) -> None:
    """Browse the packs, samples, tokens, media and rejected records of a dataset in a local page.

    The page is read-only, needs no network, and is for this machine only. Ctrl-C ends the command.

    \b
    energon-packed view out
    energon-packed view out --port 8000 --no-browser
    """
    folder = PackedFolder.open(path)
    encoder, reason = folder.encoder_or_reason(tokenizer)
    viewer = Viewer(folder, encoder, as_options(reason))
    # Ctrl-C is the usual end, not an interruption.
    with suppress(KeyboardInterrupt), ViewServer(viewer, port, token=not no_token) as server:
        echo(f"{server.url}\nCtrl-C ends it.")
        # Without a display, `webbrowser` would start a browser in the terminal.
        if not no_browser and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
            webbrowser.open(server.url)
        server.serve_forever()
