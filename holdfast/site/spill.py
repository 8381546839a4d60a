"""What is kept for long goes to disk: bundles that only a task that is rebuilt would need.

Rows are written once, to a file that is mapped into memory and has no name any more: the operating
system takes its pages back when memory is wanted for something else, reads them again when somebody
does, and frees the disk when the last bundle of the file is let go, or the process is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from holdfast.core.exchange import Kept
from holdfast.engine.batches import from_ipc, to_ipc
from holdfast.net.bundles import Frames

log = logging.getLogger("holdfast.site")

AT_ONCE = 32 << 20
"""So many bytes are written at most before other work goes on."""
SEGMENT_BYTES = 64 << 20


class Spill:
    """Keeps at most `bytes_max` of rows in memory."""

    def __init__(self, folder: str | None, bytes_max: int) -> None:
        """Files are in `folder`, by default where temporary ones are."""
        self._folder, self._bytes_max = folder, bytes_max
        self.kept_bytes = self.spilled_bytes = 0
        """Of what was kept when it was last looked at: all of it, and what is on disk."""
        self.error: str | None = None
        """Why nothing can be written, if that is so. Then everything stays in memory."""

    def make_room(self, kept: Iterable[Kept]) -> None:
        """Write the oldest of these bundles, if all are too many."""
        filled = [k for k in kept if k.bundle.batch.num_rows]
        here = [k for k in filled if not k.bundle.spilled]
        self.kept_bytes = sum(k.bundle.nbytes for k in filled)
        self.spilled_bytes = self.kept_bytes - sum(k.bundle.nbytes for k in here)
        surplus = min(self.kept_bytes - self.spilled_bytes - self._bytes_max, AT_ONCE)
        if surplus > 0:
            self._write(_first(sorted(here, key=lambda k: k.epoch), surplus))

    def _write(self, chosen: list[Frames]) -> None:
        try:
            mapped, sizes = self._mapped([frames.batch.serialize() for frames in chosen])
        except OSError as error:
            if self.error is None:
                log.warning("what is kept cannot go to disk and stays in memory: %s", error)
            self.error = str(error)
            return
        self.error = None
        at = 0
        for frames, size in zip(chosen, sizes, strict=True):
            rows = pa.ipc.read_record_batch(mapped.slice(at, size), frames.batch.schema)
            frames.put_aside(rows)
            self.spilled_bytes += frames.nbytes
            at += size

    def _mapped(self, parts: list[pa.Buffer]) -> tuple[pa.Buffer, list[int]]:
        descriptor, path = tempfile.mkstemp(".spill", "holdfast-", self._folder)
        try:
            with open(descriptor, "wb") as file:
                for part in parts:
                    file.write(part)
            with pa.memory_map(path) as whole:
                return whole.read_buffer(), [part.size for part in parts]
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _first(kept: Iterable[Kept], nbytes: int) -> list[Frames]:
    """As many as have so many bytes."""
    chosen: list[Frames] = []
    for k in kept:
        if nbytes <= 0:
            break
        nbytes -= k.bundle.nbytes
        chosen.append(k.bundle)
    return chosen


@dataclass(slots=True, eq=False)
class Held:
    """Rows that an `Overflow` holds, in memory or on disk; `nbytes` is their size in memory. Each
    of its `users` releases it once."""

    rows: pa.RecordBatch
    nbytes: int
    on_disk: bool
    users: int = 1

    def share(self) -> Held:
        self.users += 1
        return self


class Overflow:
    """Holds batches of rows: up to `bytes_max` of them in memory, and the others on disk.

    `release` is called when rows are dropped, and makes room in memory. Disk space is free again
    when nobody refers to the rows of a segment any more.
    """

    def __init__(self, folder: str | None, bytes_max: int) -> None:
        self.folder, self._bytes_max = folder, bytes_max
        self._segment: _Segment | None = None
        self.memory_bytes = 0
        """Of the rows held in memory."""

    def hold(self, rows: pa.RecordBatch) -> Held:
        """In memory after all if the disk does not take them."""
        try:
            return self.hold_within(rows)
        except OSError as error:
            log.warning("rows that should be on disk stay in memory: %s", error)
            return self._in_memory(rows)

    def hold_within(self, rows: pa.RecordBatch) -> Held:
        """An `OSError` if the disk does not take them; nothing is held then."""
        nbytes = int(rows.nbytes)
        if nbytes and self.memory_bytes + nbytes > self._bytes_max:
            return Held(from_ipc(self._write(to_ipc(rows))), nbytes, True)
        return self._in_memory(rows)

    def _in_memory(self, rows: pa.RecordBatch) -> Held:
        held = Held(rows, int(rows.nbytes), False)
        self.memory_bytes += held.nbytes
        return held

    def release(self, dropped: Iterable[Held]) -> None:
        for held in dropped:
            held.users -= 1
            if not held.users and not held.on_disk:
                self.memory_bytes -= held.nbytes

    def _write(self, data: pa.Buffer) -> pa.Buffer:
        if self._segment is None or self._segment.room < data.size:
            self._segment = _Segment(self.folder, max(SEGMENT_BYTES, data.size))
        return self._segment.add(data)


class _Segment:
    """A file of fixed size that loses its name before the first byte is written, so that it does
    not outlive the process. It is mapped as a whole and filled from the beginning."""

    def __init__(self, folder: str | None, nbytes: int) -> None:
        descriptor, path = tempfile.mkstemp(".spill", "holdfast-", folder)
        self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115 (closed when collected)
        try:
            os.ftruncate(descriptor, nbytes)
            with pa.memory_map(path, "r+") as whole:
                self._mapped = whole.read_buffer()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._end = 0

    @property
    def room(self) -> int:
        return self._mapped.size - self._end

    def add(self, data: pa.Buffer) -> pa.Buffer:
        """The same bytes, in the file. Written and not stored through the map: of a disk that is
        full a write says so, while a store would end the process."""
        rest, at = memoryview(data), self._end
        while rest.nbytes:
            written = os.pwrite(self._file.fileno(), rest, at)
            rest, at = rest[written:], at + written
        begin, self._end = self._end, min(self._mapped.size, -(-at // 64) * 64)
        return self._mapped.slice(begin, data.size)
