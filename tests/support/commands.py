"""Rows that tell a stateful processor what to do."""

from __future__ import annotations

import datetime
import random

import pyarrow as pa

UTC = datetime.UTC


BEGIN = datetime.datetime(2024, 1, 1, tzinfo=UTC)


COMMANDS = ["wait", "wait", "wait twice", "forget timers", "shorten", "clear", "quiet", "add"]


def table(rng: random.Random, n: int, commands: list[str]) -> pa.RecordBatch:
    micros = [10_000 * i + rng.randrange(-40_000, 40_000) for i in range(n)]
    return pa.record_batch(
        {
            "k": pa.array([rng.choice(["a", "b", None, "dd"]) for _ in range(n)], pa.string()),
            "ts": pa.array(
                [BEGIN + datetime.timedelta(microseconds=m) for m in micros],
                pa.timestamp("us", "UTC"),
            ),
            "n": pa.array([rng.randrange(9) for _ in range(n)], pa.int64()),
            "cmd": pa.array([rng.choice(commands) for _ in range(n)], pa.string()),
        }
    )
