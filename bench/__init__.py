"""Benchmarks: wal, drain and latency are figures; profile_sql is for maintainers."""
