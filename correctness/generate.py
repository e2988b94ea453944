"""Mutants of the SQL by rule, from a seed: the same script and seed give the same ones.

Only the bodies of functions are changed, never comments or quoted strings. Whether a mutant can be
installed at all is for the runner to find out.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.edits import DEFINITION, Edit, ScriptError, apply

MAX_PER_FUNCTION = 2
BODY = re.compile(
    r"^(?:AS \$function\$(?P<quoted>.*?)\$function\$;|RETURN (?P<atomic>.*?);$)", re.M | re.S
)
NO_CODE = re.compile(r"--[^\n]*|'(?:[^']|'')*'")
# Of RAISE and of a SET list; BETWEEN has an AND of its own.
NO_COMPARISON = re.compile(r"\b(ERRCODE|MESSAGE|DETAIL|HINT|CONSTRAINT|SET \S+)\Z")
# What follows leaves out changes that nobody could notice, whatever he tried.
# No position is the base of its lane: a range may end on either side of it.
LANE_BASE = re.compile(r"\s+(v_base|v_end|@extschema@\._lane_base\()")
# Who reads one row reads the first, and one row above a limit tells that there are more, as two do.
# How much is done at a time and how often it is tried is promised nowhere. The rest is words.
NO_NUMBER = re.compile(
    r"(\bLIMIT |\bFOR v_round IN (1 \.\. )?|\b(c_\w+|p_limit) \+ |@extschema@\._refuse\([^;]*"
    r"|\bc_(most|portion|small|start|pause|longest)\w* constant [^;]*)\Z"
)
# What only saves a look into something empty.
SHORTCUT = re.compile(
    r"NOT (@extschema@\._leaf_in_use\([^()]*\)|EXISTS \(SELECT FROM @extschema@\.\w+\))"
)
BETWEEN = re.compile(r"\bBETWEEN (?:(?!\bAND\b|\bOR\b|\bTHEN\b).)*\Z", re.S)
OPPOSITE = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "=": "<>",
    "<>": "=",
    "AND": "OR",
    "OR": "AND",
    "least": "greatest",
    "greatest": "least",
    "+": "-",
    "-": "+",
}

Replacement = tuple[int, int, str]  # from, to, text


@dataclass(frozen=True, slots=True)
class Mutant:
    """A way to break the script, with a name that does not depend on line numbers."""

    group: str
    name: str
    edits: tuple[Edit, ...]


def opposite(match: re.Match[str]) -> Replacement:
    return match.start(1), match.end(1), OPPOSITE[match[1]]


def comparison(match: re.Match[str]) -> Replacement | None:
    before = match.string[: match.start()]
    is_edge = LANE_BASE.match(match.string, match.end()) and match[1] not in ("=", "<>")
    return None if is_edge or NO_COMPARISON.search(before) else opposite(match)


def connective(match: re.Match[str]) -> Replacement | None:
    before = match.string[: match.start()]
    return None if match[1] == "AND" and BETWEEN.search(before) else opposite(match)


def drop(match: re.Match[str]) -> Replacement:
    return match.start(), match.end(), ""


def never(match: re.Match[str]) -> Replacement | None:
    return None if SHORTCUT.fullmatch(match[1]) else (match.start(1), match.end(1), "false")


def always(match: re.Match[str]) -> Replacement | None:
    """But not where it is asked whether something is remembered: it would be found once more."""
    asked = re.match(r"(v_\w+) IS NULL OR\b", match[1])
    block = match.string[match.end() : match.string.find("END IF", match.end())]
    is_memory = asked and re.search(rf"\b{asked[1]} :=", block)
    return None if is_memory else (match.start(1), match.end(1), "true")


def negate(match: re.Match[str]) -> Replacement:
    return match.start(1), match.end(1), f"NOT ({match[1]})"


def one_more(match: re.Match[str]) -> Replacement | None:
    is_free = NO_NUMBER.search(match.string[: match.start()])
    return None if is_free else (match.start(), match.end(), str(int(match[0]) + 1))


def call(match: re.Match[str], text: str) -> Replacement | None:
    """Replace a call, which ends where its parentheses are closed."""
    depth = 0
    for end in range(match.end() - 1, len(match.string)):
        depth += {"(": 1, ")": -1}.get(match.string[end], 0)
        if depth == 0:
            return match.start(1), end + 1, text
    return None


Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], Replacement | None]]
CONDITION = r"\b(?:ELSIF|IF) ((?:(?!\bTHEN\b|;).)+) THEN\b"
RULES: dict[str, Rule] = {
    "comparison": (re.compile(r"(?<= )(<=|>=|<>|=|<|>)(?=\s)"), comparison),
    "negated": (re.compile(CONDITION, re.S), negate),
    "always": (re.compile(CONDITION, re.S), always),
    "never": (re.compile(CONDITION, re.S), never),
    "goes on": (re.compile(r"\b(?:EXIT|CONTINUE) WHEN ([^;]+);"), never),
    "unlocked": (
        re.compile(r"\bPERFORM (pg_advisory_xact_lock(?:_shared)?\()"),
        lambda match: call(match, "1"),
    ),
    "not tried": (
        re.compile(r"\b(pg_try_advisory_xact_lock(?:_shared)?\()"),
        lambda match: call(match, "true"),
    ),
    "rows unlocked": (re.compile(r"\s+FOR UPDATE( OF \w+)?( SKIP LOCKED)?"), drop),
    "not called": (
        re.compile(r"\bPERFORM (@extschema@\.\w+\()"),
        lambda match: call(match, "1"),
    ),
    "connective": (re.compile(r"\s(AND|OR)\s"), connective),
    "one more": (re.compile(r"(?<![\w.$%{\[:\"])\d{1,9}(?![\w.$\"])"), one_more),
    "no not": (re.compile(r"\bNOT (?!NULL)"), drop),
    "bound": (re.compile(r"\b(least|greatest)(?=\()"), opposite),
    "unordered": (re.compile(r"\s+ORDER BY [^;()]+?(?=\s+(?:LIMIT|FOR|LOOP)\b|\)|;|\s+\$)"), drop),
    "unlimited": (re.compile(r"\s+LIMIT (?!1\b)[\w.$]+(?![\w.$]| [-+])"), drop),
    "other end": (re.compile(r" DESC\b"), drop),
    "arithmetic": (re.compile(r"(?<=[\w)\]] )([-+])(?= [\w(@])"), opposite),
}


def without_strings(body: str) -> str:
    """Blank comments and quoted strings; every other character stays where it is."""
    return NO_CODE.sub(lambda match: "\0" * len(match[0]), body)


def edit_of(name: str, definition: str, start: int, end: int, text: str) -> Edit | None:
    """Return the replacement as an edit of whole lines, as many as it takes to be the only one."""
    first = definition.rfind("\n", 0, start) + 1
    last = definition.find("\n", end)
    while definition.count(definition[first:last]) > 1:
        if first == 0:
            return None
        first = definition.rfind("\n", 0, first - 1) + 1
    old = definition[first:last]
    return Edit(name, old, definition[first:start] + text + definition[end:last])


def edits_of(script: str) -> dict[str, list[Edit]]:
    """Return every edit that each rule can make, in the order of the script."""
    found: dict[str, list[Edit]] = {rule: [] for rule in RULES}
    seen: set[str] = set()
    for match in re.finditer(DEFINITION.format(name=r"(\w+)"), script, re.M | re.S):
        body = BODY.search(match[0])
        if body is None or match[1] in seen:
            continue
        seen.add(match[1])
        part = "quoted" if body["quoted"] else "atomic"
        code = "\0" * body.start(part) + without_strings(body[part])
        for rule, (pattern, change) in RULES.items():
            for site in pattern.finditer(code):
                replacement = change(site)
                if replacement is None:
                    continue
                start, end, text = replacement
                if rule == "negated":  # the text as it is, with its strings
                    text = f"NOT ({match[0][start:end]})"
                edit = edit_of(match[1], match[0], start, end, text)
                if edit is not None:
                    found[rule].append(edit)
    return found


def generate(script: str, seed: int) -> Iterator[Mutant]:
    """Draw mutants without end, few of one function, until none is left.

    A rule with many places is drawn more often than one with few, but not as much as that: else
    there would be no locks among the mutants.
    """
    chance = random.Random(seed)
    found = edits_of(script)
    for edits in found.values():
        chance.shuffle(edits)
    weights = {rule: math.sqrt(len(edits)) for rule, edits in found.items() if edits}
    drawn = Counter[str]()
    while weights:
        [rule] = chance.choices(list(weights), list(weights.values()))
        edit = next_edit(script, found[rule], drawn)
        if edit is None:
            del weights[rule]
            continue
        drawn[edit.function] += 1
        digest = hashlib.sha256(f"{edit.function}\n{edit.old}\n{edit.new}".encode())
        name = f"{rule}: {edit.function} {digest.hexdigest()[:8]}"
        yield Mutant("generated", name, (edit,))


def next_edit(script: str, edits: list[Edit], drawn: Counter[str]) -> Edit | None:
    """Take the next edit whose function has not had its share and that the script takes."""
    while edits:
        edit = edits.pop()
        if drawn[edit.function] < MAX_PER_FUNCTION:
            try:
                apply(script, edit)
            except ScriptError:
                continue  # two functions of one name that differ
            return edit
    return None
