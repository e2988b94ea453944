"""Benchmarks: a module for each scenario, each prints figures; profile_sql is for maintainers."""
