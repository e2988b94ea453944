"""Spin, fetched from Debian without installing it, and one exhaustive search with it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.servers import apt_download, cache_lock

# Defined for the compiler of the verifier; every other -D is the model's own.
PAN_DEFINES = {"COLLAPSE", "NOREDUCE", "NOFAIR", "NFAIR", "VECTORSZ", "SPACE", "REACH"}
INEXACT = re.compile(r"BITSTATE|HC\d?")
PAN_FLAGS = re.compile(r"-(a|f|E|l|m\d+|w\d+)")
TRAIL_LINES = 200
# A never claim and the end of a process that loops are no lines of the model.
UNREACHED = re.compile(r"^\t([\w.]+\.pml):(\d+), state \d+, \"(.*)\"$", re.MULTILINE)
STATES = re.compile(r"\] [\w.-]*?([\w.]+\.pml):(\d+) => (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    """What a check line of a model says."""

    text: str
    model: tuple[str, ...]  # -D for the model
    compiler: tuple[str, ...]  # -D for the verifier
    pan: tuple[str, ...]

    @property
    def searches_cycles(self) -> bool:
        return "-a" in self.pan or "-l" in self.pan

    @classmethod
    def parse(cls, text: str) -> Options:
        """Sort the words of a check line; refuse what would make a search less than exhaustive."""
        model: list[str] = []
        compiler: list[str] = []
        pan: list[str] = []
        for word in text.split():
            name = word[2:].partition("=")[0]
            if word.startswith("-D") and not INEXACT.fullmatch(name):
                (compiler if name in PAN_DEFINES else model).append(word)
            elif PAN_FLAGS.fullmatch(word):
                pan.append(word)
            else:
                raise ValueError(f"check line {text!r}: {word!r} is not allowed")
        return cls(text, tuple(model), tuple(compiler), tuple(pan))


@dataclass(frozen=True, slots=True)
class Search:
    """What one run of a verifier said."""

    errors: tuple[str, ...]
    incomplete: tuple[str, ...]
    states: int
    depth: int
    seconds: float
    mebibytes: float
    compiled: Counter[tuple[int, str]]  # statements by line and text
    unreached: Counter[tuple[int, str]]
    trail: str


def spin_program() -> Path:
    """Return spin's path; the package is unpacked into the cache on first use."""
    for tool in ("gcc", "cpp"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"the models need {tool}, which is missing: apt-get install gcc")
    with cache_lock() as cache:
        root = cache / "spin"
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                apt_download(["spin"], Path(folder) / "spin")
                (Path(folder) / "spin").rename(root)
        return root / "usr/bin/spin"


def run(command: Sequence[str | Path], cwd: Path, seconds: float | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    # pan ends with 0 whatever it found; anything else is a failure to run.
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def preprocessed(model: Path, options: Options, mutant: str | None = None) -> str:
    """Return the text that spin reads; a mutant that does not change it says nothing."""
    defines = [*options.model, *([f"-D{mutant}"] if mutant else [])]
    return run(["cpp", "-P", *defines, model], model.parent)


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    return float(found[1]) if found else 0.0


def statements(pattern: re.Pattern[str], text: str) -> Counter[tuple[int, str]]:
    """Count statements by line and text; numbers in it may come from a configuration."""
    found: Iterable[tuple[str, str, str]] = pattern.findall(text)
    return Counter(
        (int(line), re.sub(r"\d+", "0", step)) for _, line, step in found if step != "-end-"
    )


def reachable_part(text: str) -> str:
    """Return pan's list of unreached states without that of never claims."""
    return re.sub(r"^unreached in claim .*?(?=^unreached in|\Z)", "", text, flags=re.M | re.S)


def search(
    model: Path,
    options: Options,
    *,
    mutant: str | None = None,
    claim: str | None = None,
    by_statement: bool = False,
    mebibytes: int = 4096,
    seconds: float | None = None,
    is_small: bool = False,
) -> Search:
    """Generate, compile and run the verifier of a model: its assertions, or one of its claims."""
    began = time.monotonic()
    spin = spin_program()
    with tempfile.TemporaryDirectory(prefix="awa-model-") as name:
        folder = Path(name)
        for file in (model, *model.parent.glob("*.inc")):
            shutil.copy(file, folder)
        defines = [*options.model, *([f"-D{mutant}"] if mutant else [])]
        # Every statement on its own, also within d_step: then pan knows the unreached ones.
        defines += ["-Dd_step=atomic", "-o3"] if by_statement else []
        said = run([spin, *defines, "-a", model.name], folder)
        if "Error" in said or not (folder / "pan.c").exists():
            raise RuntimeError(f"{model.name} {' '.join(defines)}: {said}")
        safety = [] if claim else ["-DSAFETY", "-DNOCLAIM"]
        # A small search takes less time than a good compiler, or than clearing a large hash table.
        optimise = "-O0" if is_small else "-O2"
        hash_table = ["-w20"] if is_small else []
        limit = f"-DMEMLIM={mebibytes}"
        run(
            ["gcc", "-w", optimise, limit, *options.compiler, *safety, "-o", "pan", "pan.c"], folder
        )
        table = run([folder / "pan", "-d"], folder) if by_statement else ""
        named = ["-N", claim] if claim else []
        output = run([folder / "pan", *hash_table, *options.pan, *named], folder, seconds)
        trail = ""
        if mutant is None and list(folder.glob("*.trail")):
            trail = run([spin, *defines, "-t", "-p", "-g", "-l", model.name], folder)
        return read_search(output, table, trail, time.monotonic() - began)


def read_search(output: str, table: str, trail: str, seconds: float) -> Search:
    errors = re.findall(r"^pan:\d+: (.*?) \(at depth \d+\)", output, re.MULTILINE)
    incomplete = re.findall(
        r"^.*(?:max search depth too small|out of memory|-DMEMLIM bound|truncated).*$", output, re.M
    )
    if not errors:
        incomplete += re.findall(r"Search not completed", output)
    if "errors: " not in output:
        incomplete.append("no summary")
    if not errors and not incomplete and "errors: 0" not in output:
        errors = ["an error of an unknown kind"]
    return Search(
        errors=tuple(errors),
        incomplete=tuple(incomplete),
        states=int(number(r"([\d.e+]+) states, stored", output)),
        depth=int(number(r"depth reached (\d+)", output)),
        seconds=seconds,
        mebibytes=number(r"([\d.]+)\ttotal actual memory usage", output),
        compiled=statements(STATES, table.split("\nclaim ")[0]),
        unreached=statements(UNREACHED, reachable_part(output)),
        trail="\n".join(trail.splitlines()[-TRAIL_LINES:]),
    )
