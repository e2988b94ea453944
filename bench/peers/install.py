"""Install the peers whose pins changed or that are missing: make bench-peers."""

from __future__ import annotations

import shutil
import sys
import venv
from pathlib import Path

from bench.adapters import PEER_NAMES, PEERS
from bench.report import say
from tools.servers import run

PINS = Path(__file__).resolve().parent
NPM_FILES = ("package.json", "package-lock.json")


def pins(name: str) -> str:
    """What decides the environment of a peer."""
    if (PINS / name).is_dir():
        return "".join((PINS / name / file).read_text() for file in NPM_FILES)
    return (PINS / f"{name}.txt").read_text()


def install_python(name: str, folder: Path) -> None:
    """Make a virtual environment."""
    venv.create(folder, with_pip=True)
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-deps", "-r", PINS / f"{name}.txt")


def install_node(name: str, folder: Path) -> None:
    """Make a folder of packages, among them the Node that runs them."""
    folder.mkdir(parents=True)
    for file in NPM_FILES:
        shutil.copy(PINS / name / file, folder)
    run("npm", "ci", "--no-audit", "--no-fund", cwd=folder)


def main() -> int:
    for name in PEER_NAMES:
        folder = PEERS / name
        done = folder / "pins"
        if done.exists() and done.read_text() == pins(name):
            continue
        say(f"installing {name} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        install = install_node if (PINS / name).is_dir() else install_python
        install(name, folder)
        done.write_text(pins(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
