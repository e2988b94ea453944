"""A PgBouncer of Debian's package on a free loopback port, in front of a server."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tools.servers import (
    apt_download,
    cache_lock,
    debian_environment,
    free_port,
    own_directory,
    run,
    spawn,
)

PACKAGES = ("pgbouncer", "libevent-2.1-7", "libc-ares2")
START_SECONDS = 20
# Few server connections, so that clients do get each other's.
OPTIONS = {"default_pool_size": "2", "max_client_conn": "200", "auth_type": "any"}


def ensure_pgbouncer() -> tuple[Path, Mapping[str, str]]:
    """The program and its environment, unpacked if need be."""
    with cache_lock() as cache:
        root = cache / "pgbouncer"
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                draft = Path(folder) / "pgbouncer"
                apt_download(PACKAGES, draft)
                run("chmod", "-R", "go+rX", draft)
                draft.rename(root)
        return root / "usr/sbin/pgbouncer", debian_environment(root)


class PgBouncer:
    """Runs inside its `with` block; any database of the server can be reached through it."""

    def __init__(self, dsn: str, mode: str, options: Mapping[str, str] | None = None) -> None:
        self._server = conninfo_to_dict(dsn)
        self._options = {**OPTIONS, "pool_mode": mode, **(options or {})}
        self._directory = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def dsn(self, dsn: str) -> str:
        """A connection string of the server that leads through the pooler."""
        return make_conninfo(dsn, host="127.0.0.1", port=self.port)

    def __enter__(self) -> Self:
        program, environment = ensure_pgbouncer()
        with cache_lock() as cache:
            parent = own_directory(cache / "poolers")
        self._directory = Path(tempfile.mkdtemp(dir=parent))
        self._directory.chmod(0o755)
        self.port = free_port()
        settings = self._options | {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "admin_users": "postgres",
        }
        server = f"host={self._server['host']} port={self._server['port']} user=postgres"
        lines = ["[databases]", f"* = {server}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        configuration = self._directory / "pgbouncer.ini"
        configuration.write_text("\n".join(lines) + "\n")
        self._process = spawn([program, configuration], self._directory / "log", env=environment)
        self._wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.dsn(make_conninfo("", **self._server))).close()
            except psycopg.OperationalError as error:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = (self._directory / "log").read_text(errors="replace")
                    self.__exit__()
                    raise RuntimeError(f"pgbouncer did not start:\n{log}") from error
                time.sleep(0.05)
            else:
                return
