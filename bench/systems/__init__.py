"""The systems under test, each a program of its own that speaks `protocol`; never imported here."""
