"""Runs `energon-packed` as `python -m energon_packed`: input: the command line; output: that of the command."""

from energon_packed.cli.main import main

if __name__ == "__main__":
    main()
