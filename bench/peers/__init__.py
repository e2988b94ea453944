"""Installs the peers, each into an environment of its own below build/bench, versions pinned."""
