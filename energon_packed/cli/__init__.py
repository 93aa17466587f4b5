"""The command line, and the only layer that prints: one module per command, main.py starts them.

options.py: click options from declared options. output.py, terminal.py, display.py, progress.py: the printed text.
"""
