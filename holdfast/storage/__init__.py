"""Checkpoint files: their layout, their checksums, their owner, and the restore points of a
flow."""
