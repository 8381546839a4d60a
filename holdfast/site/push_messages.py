"""Push batches as messages between replicas, and as what is stored."""

from __future__ import annotations

import pyarrow as pa

from holdfast.engine.batches import to_ipc
from holdfast.net import wire
from holdfast.net.bundles import rows_of
from holdfast.site.push_entries import FeedPlace, Lead, LogEntry
from holdfast.site.spill import Overflow


def encode(source: int, rank: int, entry: LogEntry) -> tuple[wire.PushBatch, list[pa.Buffer]]:
    """Return the message of a leader of this rank that has a push batch, and its body."""
    bodies = [to_ipc(held.rows) for held in entry.rows]
    message = wire.PushBatch(
        source,
        entry.number,
        entry.place.marks() | {"more": int(entry.more)},
        [b.size for b in bodies],
        entry.pull_mark,
        entry.place.query,
        rank,
        (entry.lead.rank, entry.lead.base),
    )
    return message, bodies


def rows_in(message: wire.PushBatch, body: memoryview) -> list[pa.RecordBatch]:
    """Return the rows in the body of a message."""
    rows, at = [], 0
    for size in message.sizes:
        rows.append(rows_of(body[at : at + size]))
        at += size
    return rows


def decode(message: wire.PushBatch, rows: list[pa.RecordBatch], overflow: Overflow) -> LogEntry:
    """Return the push batch of a message; `overflow` holds its rows."""
    more, place = bool(message.marks.get("more", 0)), FeedPlace.after(message)
    held = [overflow.hold(batch) for batch in rows]
    lead = Lead(*message.made)
    return LogEntry(message.number, held, more, place, message.pull_reader, lead)
