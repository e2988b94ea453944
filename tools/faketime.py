"""A server under Debian's libfaketime, whose clock can be set while it runs."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from tools.servers import MEMORY, Tree, apt_download, cache_lock, run

PACKAGE = "libfaketime"
# The library allocates memory when it reads its file, and PostgreSQL asks for the time in signal
# handlers too. So it reads seldom; and it is not the variant with a lock, which can be held then.
CACHE_SECONDS = 1


def ensure_faketime() -> Path:
    """The library, unpacked if need be."""
    with cache_lock() as cache:
        root = cache / "faketime"
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                draft = Path(folder) / "faketime"
                apt_download((PACKAGE,), draft)
                run("chmod", "-R", "go+rX", draft)
                draft.rename(root)
        [library] = root.glob("usr/lib/*/faketime/libfaketime.so.1")
        return library


class FakeClock:
    """Seconds from the right time, in a file that the server's processes read once a second."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.file = Path(self._folder.name) / "offset"
        Path(self._folder.name).chmod(0o755)
        self.set(0)

    def set(self, seconds: int) -> None:
        """Step the clock; each process sees the new time within CACHE_SECONDS."""
        draft = self.file.with_suffix(".new")
        draft.write_text(f"{seconds:+}\n")
        draft.chmod(0o644)
        draft.rename(self.file)

    def tree(self, tree: Tree) -> Tree:
        """The same server, under this clock. Timers of the kernel and pauses run as always."""
        extra = {
            "LD_PRELOAD": str(ensure_faketime()),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_CACHE_DURATION": str(CACHE_SECONDS),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
        return dataclasses.replace(tree, env={**tree.env, **extra})
