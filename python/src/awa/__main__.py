"""`python -m awa` is the `awa` command."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="awa")
