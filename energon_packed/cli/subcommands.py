"""The subcommands: a name in, a command out, whose module is imported when it is called."""

import difflib
import importlib
import sys
import threading

import click

from energon_packed.version import __version__

_SILENT = 1.0  # seconds of imports until a line is printed

COMMANDS = {
    "lengths": "Compare values of --seq-len: dropped tokens, utilization, attention.",
    "pack": "Pack conversations with images, videos and audio into an Energon dataset.",
    "inspect": "Show the contents of a tar, a dataset, a Metadataset or a pack.",
    "verify": "Check that a dataset is intact and matches its manifest.",
    "steps": "Show the steps of an epoch, and how long ranks wait for the slowest.",
    "view": "Browse a dataset in a local, read-only page.",
    "report": "Write an HTML report on a dataset or a Metadataset.",
    "nv-meta": "Create or repair .nv-meta for a folder of tars.",
    "materialize": "Copy the images and videos that a dataset refers to into its tars.",
    "metadataset": "Blend several datasets into one weighted Metadataset.",
    "state": "Redistribute saved loader states to another number of ranks.",
    "order": "Check the order log of a run, or show the samples of a step.",
    "demo": "Generate a small dataset, pack it and load one epoch.",
}


class _LazyGroup(click.Group):
    """Group that imports a subcommand when it is called, so that `--help` is instant."""

    def list_commands(self, context: click.Context) -> list[str]:
        """List the command names in the order of COMMANDS."""
        return list(COMMANDS)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from COMMANDS: click would import every command for its short help."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name, suggest a similar name (click knows only imported commands)."""
        try:
            return super().resolve_command(context, args)
        except click.UsageError as error:
            if close := difflib.get_close_matches(args[0], COMMANDS, 1):
                raise click.UsageError(f"{error.message} Did you mean '{close[0]}'?", context) from error
            raise

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import the command of module `energon_packed.cli.commands.{name}`."""
        if name not in COMMANDS:
            return None
        # The first import after an installation reads and compiles some thousand files. Logs are not shown yet.
        timer = threading.Timer(_SILENT, click.echo, ("loading the libraries ...",), {"err": True})
        timer.daemon = True
        if _shows_steps() and not context.resilient_parsing:  # as it is for shell completion
            timer.start()
        try:
            module = importlib.import_module(f"energon_packed.cli.commands.{name.replace('-', '_')}")
        finally:
            timer.cancel()
        command: click.Command = module.command
        return command


def _shows_steps() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and {"-q", "--quiet"}.isdisjoint(sys.argv)


@click.group(
    cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help", "--help-all"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="energon-packed")
def cli() -> None:
    """Pack conversations with images, videos and audio into rows, stored as Megatron-Energon datasets.

    \b
    energon-packed demo --output-dir demo-out
    energon-packed pack data.jsonl -o out --seq-len 4096 --tokenizer DIR
    """
