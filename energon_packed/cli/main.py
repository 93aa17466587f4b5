"""Entry point: finds the subcommand, and turns every user error into one line and exit status 1."""

import gc
import importlib
import os
import sys

import click

from energon_packed.errors import EnergonPackedError
from energon_packed.version import __version__

COMMANDS = {
    "lengths": "Show how long samples are, and what each --seq-len would cost.",
    "pack": "Pack conversations with images into an Energon data set.",
    "inspect": "Show what is in a tar, a data set, a Metadataset or one pack.",
    "verify": "Check that a data set is whole and what its manifest says.",
    "report": "Write one HTML page about a data set or a Metadataset.",
    "nv-meta": "Make or repair .nv-meta for a folder of tars.",
    "metadataset": "Blend several data sets into one weighted Metadataset.",
    "demo": "Make a small data set, pack it, load one epoch: the whole tool in a minute.",
}


class _LazyGroup(click.Group):
    """Imports a subcommand when it is called, so that `--help` is instant."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Names in the order of COMMANDS."""
        return list(COMMANDS)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help text, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The command of module `energon_packed.cli.{name}`."""
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"energon_packed.cli.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="energon-packed")
def cli() -> None:
    """Pack conversations with images into rows of fixed length, as Megatron-Energon data sets.

    \b
    energon-packed demo --output-dir demo-out
    energon-packed pack data.jsonl -o out --seq-len 4096 --tokenizer DIR
    """


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 a user error in one line, 2 wrong usage."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notices on missing backends mean nothing here
    try:
        cli(standalone_mode=False)
        gc.freeze()  # the process ends now: without this, half a second goes into walking what torch has loaded
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted; run the same command again to go on from here", 130)
    except EnergonPackedError as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)


def _fail(message: str, status: int) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(status)
