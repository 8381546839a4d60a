"""A sink that writes a folder of parquet files with every row exactly once. The protocol between
writers is in `holdfast.connectors.parquet_folder`.

A thread writes the files, so that the site does not block on the disk. While the disk is full or
does not answer, the writer holds rows up to a bound; at the bound the flow waits.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from enum import Enum, auto
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from holdfast.connectors.parquet_folder import PartFolder, StagingGone
from holdfast.connectors.parquet_parts import Beginning, Overtaken
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.engine.durations import Seconds, seconds
from holdfast.errors import FlowError, HoldfastError, SinkError, require
from holdfast.storage.disk import Disk

log = logging.getLogger("holdfast.parquet")

FILE_ROWS = 1 << 20
"""A writer that holds this many rows publishes them before `interval` has passed."""
HELD_BYTES_MAX = 128 << 20
RETRY_S, RETRY_S_MAX = 0.1, 2.0
QUIET_S = 30.0
"""How long an overtaken writer stays quiet. Normally its site is fenced in that time. If the site
still leads afterwards, the flow was started twice with the same secret, which is an error."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


class Parquet(Sink):
    """See `parquet`."""

    disk = Disk()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        interval: Seconds = 1.0,
        with_order: bool = False,
        held_bytes_max: int = HELD_BYTES_MAX,
        allow_missing: bool = False,
    ) -> None:
        if held_bytes_max < 1:
            raise FlowError(
                f"parquet({str(path)!r}): held_bytes_max must be positive, not {held_bytes_max}"
            )
        self.path = _folder(path)
        self.interval_s = seconds(interval, f"parquet({str(path)!r}): interval")
        self.with_order = with_order
        self.held_bytes_max, self.allow_missing = held_bytes_max, allow_missing

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return self._begin(Beginning.FIRST, whose, schema, -1)

    def go_on(self, whose: Authority, schema: pa.Schema, durable: int) -> SinkWriter:
        return self._begin(Beginning.AFTER_STOP, whose, schema, durable)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        """The writer's thread finds the published files later: the disk may not answer now."""
        return ParquetWriter(self, self._folder_of(whose), schema, durable, claimed=False), durable

    def _begin(
        self, beginning: Beginning, whose: Authority, schema: pa.Schema, durable: int
    ) -> SinkWriter:
        """Claim the folder now, so that the start of the flow fails if it cannot be written."""
        folder = self._folder_of(whose)
        try:
            folder.claim(beginning, durable)
        except Overtaken:
            raise FlowError(
                f"sink {whose.sink!r}: a later leader of flow {whose.flow!r} writes to {self.path}",
                hint="was the flow started twice with the same secret? Use a new one each time",
            ) from None
        except OSError as error:
            raise SinkError(
                f"sink {whose.sink!r}: cannot write to the folder {self.path}: {error}",
                hint="use a folder that all sites can write to",
            ) from error
        return ParquetWriter(self, folder, schema, durable, claimed=True)

    def _folder_of(self, whose: Authority) -> PartFolder:
        path = str(self.path)
        return PartFolder(path, whose, allow_missing=self.allow_missing, disk=self.disk)


class Phase(Enum):
    """The state of a writer. Only its thread changes it, except to `ABANDONED`."""

    CLAIMING = auto()
    WRITING = auto()
    UNSURE = auto()
    """The outcome of the last publish is unknown."""
    CLOSED = auto()
    OVERTAKEN = auto()
    FAILED = auto()
    ABANDONED = auto()


_ENDS = {Phase.OVERTAKEN, Phase.FAILED, Phase.ABANDONED}
MOVES: dict[Phase, set[Phase]] = {
    Phase.CLAIMING: {Phase.WRITING, *_ENDS},
    Phase.WRITING: {Phase.UNSURE, Phase.CLAIMING, Phase.CLOSED, *_ENDS},
    Phase.UNSURE: {Phase.WRITING, Phase.CLAIMING, *_ENDS},
    Phase.CLOSED: {Phase.ABANDONED},
    Phase.OVERTAKEN: {Phase.ABANDONED},
    Phase.FAILED: {Phase.ABANDONED},
    Phase.ABANDONED: set(),
}
AT_WORK = {Phase.CLAIMING, Phase.WRITING, Phase.UNSURE}


class ParquetWriter(SinkWriter):
    """Holds rows until a thread has published them."""

    def __init__(
        self, sink: Parquet, folder: PartFolder, schema: pa.Schema, durable: int, *, claimed: bool
    ) -> None:
        self._sink, self._folder, self._schema = sink, folder, schema
        self._changed = threading.Condition()
        self._phase = Phase.WRITING if claimed else Phase.CLAIMING
        self._held: deque[tuple[int, pa.RecordBatch]] = deque()
        self._held_bytes = self._held_rows = 0
        self._durable = self._committed = durable
        self._closing = False
        self._files = self._rows = 0
        self._rolled = time.monotonic()
        self._away: str | None = None
        self._error: Exception | None = None
        self._overtaken_at = 0.0
        self._thread = threading.Thread(target=self._run, name="holdfast-parquet", daemon=True)
        self._thread.start()

    # --- what the egress calls ------------------------------------------------------------------

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        with self._changed:
            if batch.num_rows and epoch > self._durable and self._phase in AT_WORK:
                self._held.append((epoch, batch))
                self._held_bytes += batch.nbytes
                self._held_rows += batch.num_rows

    def commit(self, epoch: int) -> int:
        """Return the last epoch in a published file. A new leader checks that it finds as much."""
        with self._changed:
            self._check()
            self._committed = max(self._committed, epoch)
            self._changed.notify()
            return self._durable

    def room(self) -> bool:
        with self._changed:
            self._check()
            return self._held_bytes < self._sink.held_bytes_max

    def finish(self) -> bool:
        with self._changed:
            self._check()
            self._closing = True
            self._changed.notify()
            return self._phase is Phase.CLOSED

    def close(self) -> None:
        """Publish everything, waiting for the disk if necessary."""
        self.finish()
        self._thread.join()
        with self._changed:
            self._check()

    def abandon(self) -> None:
        with self._changed:
            self._move(Phase.ABANDONED)

    def report(self) -> dict[str, Any]:
        with self._changed:
            return {
                "rows": self._rows,
                "files": self._files,
                "held_rows": self._held_rows,
                "away": self._away,
                "foreign": list(self._folder.chain.foreign),
            }

    @property
    def _where(self) -> str:
        return f"sink {self._folder.authority.sink!r}, folder {self._sink.path}"

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        late = time.monotonic() - self._overtaken_at > QUIET_S
        if self._phase is Phase.OVERTAKEN and late:
            raise FlowError(
                f"{self._where}: a later leader of the flow has written, but this site leads",
                hint="was the flow started twice with the same secret? Use a new one each time",
            )

    def _move(self, phase: Phase) -> None:
        """Called with the lock held."""
        if self._phase is Phase.ABANDONED or phase is self._phase:
            return
        require(phase in MOVES[self._phase], f"parquet writer: {self._phase} to {phase}")
        self._phase = phase
        if phase not in AT_WORK:
            self._held.clear()
            self._held_bytes = self._held_rows = 0
        self._changed.notify()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        pause = RETRY_S
        while self._wait_until_due():
            try:
                self._step()
                if self._away is None:
                    pause = RETRY_S
            except OSError as error:
                self._note_away(error)
                self._wait(pause)
                pause = min(2 * pause, RETRY_S_MAX)
            except StagingGone:
                self._enter(Phase.CLAIMING)
            except Overtaken:
                self._overtaken_at = time.monotonic()
                self._enter(Phase.OVERTAKEN)
            except Exception as error:
                with self._changed:
                    self._error = (
                        error if isinstance(error, HoldfastError) else self._unexpected(error)
                    )
                self._enter(Phase.FAILED)

    def _wait_until_due(self) -> bool:
        """Wait for work. Return False once there will be none."""
        with self._changed:
            while self._phase is Phase.WRITING and not self._closing:
                wait = self._rolled + self._sink.interval_s - time.monotonic()
                ready = bool(self._held) and self._held[0][0] <= self._committed
                full = self._held_bytes >= self._sink.held_bytes_max // 2
                if ready and (wait <= 0 or full or self._held_rows >= FILE_ROWS):
                    break
                self._changed.wait(max(wait, 0.0) if ready else None)
            return self._phase in AT_WORK

    def _wait(self, pause: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._phase not in AT_WORK, pause)

    def _step(self) -> None:
        """Execute the next step. A step that raises `OSError` is repeated."""
        with self._changed:
            phase, upto = self._phase, self._committed
            group = [b for e, b in self._held if e <= upto]
        if phase is Phase.CLAIMING:
            self._reach(self._folder.claim(Beginning.TAKE_OVER, self._durable))
        elif phase is Phase.UNSURE:
            self._reach(self._folder.look_again())
        elif upto > self._durable:
            self._enter(Phase.UNSURE)  # until the call returns
            if self._folder.publish(group, self._schema, upto) == upto:
                self._files, self._rows = self._files + 1, self._rows + _rows(group)
            self._reach(self._folder.chain.end)
        else:
            self._folder.close(self._schema)
            self._enter(Phase.CLOSED)

    def _reach(self, durable: int) -> None:
        """Drop the rows up to this epoch, which are published, and continue writing."""
        with self._changed:
            if durable > self._durable or self._phase is Phase.CLAIMING:
                self._away, self._rolled = None, time.monotonic()
            self._durable = max(self._durable, durable)
            while self._held and self._held[0][0] <= self._durable:
                _, batch = self._held.popleft()
                self._held_bytes -= batch.nbytes
                self._held_rows -= batch.num_rows
            self._move(Phase.WRITING)

    def _enter(self, phase: Phase) -> None:
        with self._changed:
            self._move(phase)

    def _note_away(self, error: OSError) -> None:
        with self._changed:
            first, self._away = self._away is None, str(error)
        if first:
            log.warning(
                "%s: holding rows until the folder can be written to: %s", self._where, error
            )

    def _unexpected(self, error: Exception) -> SinkError:
        return SinkError(f"{self._where}: writing failed: {error}")


def _rows(batches: list[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def _folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a path or a ``file:`` URL and refuse other URLs. Publishing needs hard
    links. Object stores, as pyarrow uses them, can refuse neither a name that exists nor a fenced
    writer."""
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text).absolute()
    url = urlsplit(text)
    if scheme[1].lower() == "file" and url.netloc in ("", "localhost"):
        return Path(unquote(url.path)).absolute()
    raise FlowError(
        f"parquet({text!r}): a sink that writes each row exactly once needs a folder of a file "
        f"system (a path, or file:///path), not {scheme[1]!r}",
        hint="let Spark write there: sink('out', outlet()), and in Spark "
        "spark.readStream.format('holdfast')...writeStream.parquet(...)",
    )


def parquet(
    path: str | os.PathLike[str],
    *,
    interval: Seconds = 1.0,
    with_order: bool = False,
    held_bytes_max: int = HELD_BYTES_MAX,
    allow_missing: bool = False,
) -> Sink:
    """Write a folder of parquet files, for example for Spark to read. The sink publishes a new file
    at most every `interval` (a second).

    `path` is a folder that all sites can reach, on a file system with hard links. Each file holds
    the rows of a range of epochs; a file that a reader can see is complete and synced to disk.
    While the disk is full or does not answer, the sink holds up to `held_bytes_max` bytes of rows;
    then it holds back the source.

    A flow that continues (``restore_from=``, or under another leader) checks that the files of all
    durable epochs exist. `allow_missing` turns the check off, for files that are moved elsewhere
    while the flow runs and for a flow that continues in a new folder.
    """
    return Parquet(
        path,
        interval=interval,
        with_order=with_order,
        held_bytes_max=held_bytes_max,
        allow_missing=allow_missing,
    )
