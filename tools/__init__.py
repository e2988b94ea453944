"""Development tools: servers for tests and benchmarks, the test runner, source checks."""
