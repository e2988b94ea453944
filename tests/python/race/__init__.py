"""A race of real processes against one database, and the ledger that judges it.

`python -m race` (supervisor.py) forks producers, claimers and tick callers (actors.py), kills
claimers, drains what is left, and prints what it did. Each process keeps a file of what the
database told it (ledger.py); verdict.py compares those files with the database.
"""
