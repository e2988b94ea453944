"""Benchmarks: python -m bench.wal, bench.drain, bench.latency, and bench.profile_sql for maintainers."""
