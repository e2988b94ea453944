"""File systems of a few megabytes, to be filled up."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.servers import Cluster, Tree, server_user

FILLER = "filler"


class SmallDisk:
    """A file system in memory, mounted at a directory that the server's user owns."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        user = server_user()
        options = f"size={megabytes}m,mode=0700,uid={user.pw_uid},gid={user.pw_gid}"
        command = ["mount", "-t", "tmpfs", "-o", options, "awa-small-disk", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PermissionError(done.stderr.strip())

    def fill(self) -> None:
        """Take all the room that is left."""
        with (self.path / FILLER).open("ab") as file:
            while free := shutil.disk_usage(self.path).free:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def free(self) -> None:
        """Give the room back."""
        (self.path / FILLER).unlink(missing_ok=True)

    def unmount(self) -> None:
        """Remove it, whoever still uses it."""
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            self.path.rmdir()


def may_mount(path: Path) -> bool:
    """Whether this process may mount a file system."""
    with contextlib.suppress(PermissionError):
        SmallDisk(path, 1).unmount()
        return True
    return False


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[SmallDisk]:
    """A small disk, for as long as the block lasts."""
    disk = SmallDisk(path, megabytes)
    try:
        yield disk
    finally:
        disk.unmount()


class SmallWalCluster(Cluster):
    """A server whose WAL lies on a small disk."""

    def __init__(self, tree: Tree, options: dict[str, str], disk: SmallDisk) -> None:
        super().__init__(tree, {**options, "max_wal_size": "8MB", "min_wal_size": "2MB"})
        self._disk = disk

    def _make_data(self) -> Sequence[str]:
        return (*super()._make_data(), "--waldir", f"{self._disk.path}/wal", "--wal-segsize", "1")
