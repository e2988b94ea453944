"""A state machine that plays the life of jobs against the engine, beside a model in Python.

stage.py installs the engine with a clock that the machine sets, and puts it back between plays;
model.py is what should be true; machine.py makes the calls and compares; mutants.py breaks the
engine on purpose.
"""
