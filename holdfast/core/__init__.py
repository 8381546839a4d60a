"""The protocols as pure machines: events in, effects out; no I/O, clock, thread or randomness.

Only the standard library is imported here, and payloads are opaque. One implementation therefore
runs in Spark tasks, in plain processes, and in the simulated world.
"""
