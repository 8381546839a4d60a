"""Vectorised execution: batches, keys, state, watermarks, steps and operators."""
