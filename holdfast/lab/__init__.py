"""The laboratory: simulator, chaos, benchmarks, papers, workloads. The engine imports nothing of
it."""
