"""`python -m energon_packed` is the command `energon-packed`."""

from energon_packed.cli.main import main

if __name__ == "__main__":
    main()
