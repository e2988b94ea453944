"""Histories of long runs, and an offline checker of what the engine promises.

A history is a file of JSON lines that is only ever appended to: who did what, what was answered,
from when to when, and whether the commit is known (records.py). `python -m tests.python.history
FILE...` (checker.py) proves from them that every job ran at least once, that each attempt had one
owner, that no job came back after its end, that lanes kept their order, and that what was told
about unique keys was true. It looks at no database.
"""
