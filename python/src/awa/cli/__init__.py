"""The `awa` command: install, run workers, look at jobs and act on them."""

from .app import main

__all__ = ["main"]
