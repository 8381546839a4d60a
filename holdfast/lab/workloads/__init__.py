"""Flows and rows that benchmarks, chaos and tests share."""
