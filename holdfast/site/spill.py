"""Rows on disk: bundles that are kept for rebuilding tasks, and rows that wait to be read.

Rows are written once, to a file that is mapped into memory and has no name. The operating system
takes its pages back when it needs memory, reads them again on access, and frees the disk space when
the last reference to the file's rows is dropped, or the process ends.
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

WRITE_BYTES_MAX = 32 << 20
"""Maximum bytes written in one call, so that other work continues."""
SEGMENT_BYTES = 64 << 20


class Spill:
    """Writes kept bundles to disk, so that at most `bytes_max` of their rows are in memory."""

    def __init__(self, folder: str | None, bytes_max: int) -> None:
        """`folder` is for the files; by default that of temporary files."""
        self._folder, self._bytes_max = folder, bytes_max
        self.kept_bytes = self.spilled_bytes = 0
        """Size of all bundles at the last call of `make_room`, and of those on disk."""
        self.error: str | None = None
        """Why the last write failed; None if it did not. Without a disk all rows stay in memory."""

    def make_room(self, kept: Iterable[Kept]) -> None:
        """Write the oldest of these bundles to disk, if all are too large for memory."""
        filled = [k for k in kept if k.bundle.batch.num_rows]
        here = [k for k in filled if not k.bundle.spilled]
        self.kept_bytes = sum(k.bundle.nbytes for k in filled)
        self.spilled_bytes = self.kept_bytes - sum(k.bundle.nbytes for k in here)
        surplus = min(self.kept_bytes - self.spilled_bytes - self._bytes_max, WRITE_BYTES_MAX)
        if surplus > 0:
            self._write(_first(sorted(here, key=lambda k: k.epoch), surplus))

    def _write(self, chosen: list[Frames]) -> None:
        try:
            mapped, sizes = self._mapped([frames.batch.serialize() for frames in chosen])
        except OSError as error:
            if self.error is None:
                log.warning("kept rows cannot be written to disk and stay in memory: %s", error)
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
    """Return the first bundles that together have at least `nbytes`."""
    chosen: list[Frames] = []
    for k in kept:
        if nbytes <= 0:
            break
        nbytes -= k.bundle.nbytes
        chosen.append(k.bundle)
    return chosen


@dataclass(slots=True, eq=False)
class Held:
    """Rows that an `Overflow` holds, in memory or on disk. `nbytes` is their size in memory. Each
    of the `users` releases them once."""

    rows: pa.RecordBatch
    nbytes: int
    on_disk: bool
    users: int = 1

    def share(self) -> Held:
        self.users += 1
        return self


class Overflow:
    """Holds batches of rows: up to `bytes_max` of them in memory, and the others on disk.

    `release` drops rows, and makes room in memory. Disk space is freed when the last reference to
    the rows of a segment is dropped.
    """

    def __init__(self, folder: str | None, bytes_max: int) -> None:
        self.folder, self._bytes_max = folder, bytes_max
        self._segment: _Segment | None = None
        self.memory_bytes = 0
        """Size of the rows in memory."""

    def hold(self, rows: pa.RecordBatch) -> Held:
        """Hold rows; in memory, even beyond the bound, if the disk fails."""
        try:
            return self.hold_within(rows)
        except OSError as error:
            log.warning("rows that should be on disk stay in memory: %s", error)
            return self._in_memory(rows)

    def hold_within(self, rows: pa.RecordBatch) -> Held:
        """Hold rows within the bound. Raise `OSError`, and hold nothing, if the disk fails."""
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
    """A file of fixed size. Its name is removed before the first byte is written, so that the file
    does not outlive the process. It is mapped as a whole and filled from its start."""

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
        """Write bytes to the file and return their mapping. They are not stored through the map: on
        a full disk a write fails, while a store to the map would kill the process."""
        rest, at = memoryview(data), self._end
        while rest.nbytes:
            written = os.pwrite(self._file.fileno(), rest, at)
            rest, at = rest[written:], at + written
        begin, self._end = self._end, min(self._mapped.size, -(-at // 64) * 64)
        return self._mapped.slice(begin, data.size)
