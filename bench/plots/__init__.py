"""docs/benchmarks.md and its charts, made from result files: make bench-plots."""
