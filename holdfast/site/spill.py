"""What is kept for long goes to disk: bundles that only a unit that is made anew would need.

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

import pyarrow as pa

from holdfast.core.exchange import Kept
from holdfast.site.bundles import Frames

log = logging.getLogger("holdfast.site")

AT_ONCE = 32 << 20
"""So many bytes are written at most before other work goes on."""


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
