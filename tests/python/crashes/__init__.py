"""Crashes: what is killed, filled up, timed out or set back, and the ledger that judges it.

plays.py ends the statements of the interleaver at its pause points. storm.py runs the processes of
the race and real workers on a server of its own, and hazards.py does to them what its name says;
both keep their ledger outside the database. `python -m crashes` runs one storm.
"""
