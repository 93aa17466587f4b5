"""Entry point of `python -m energon_packed`, the same as the command `energon-packed`."""

from energon_packed.cli.main import main

if __name__ == "__main__":
    main()
