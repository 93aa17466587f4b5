"""The command line, and the only layer that prints. main.py starts it, subcommands.py finds a command.

commands/: one module per command. options.py: click options from declared options. output.py, terminal.py, display.py,
progress.py: the printed text.
"""
