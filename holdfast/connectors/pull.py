"""Pull sources, which only one site reads: a folder to which files are added, and a socket.

Two sites that read such a source would not get the same rows. So only the leading replica of the
ingress reads, and it sends every push batch to the other replicas before the batch enters the flow
(see `site/push.py`). Each push batch carries a *mark*: the position up to which the source was
read. All replicas note the mark when the rows have entered, and the next leader continues there.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import io
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.json

from holdfast.connectors.sources import PullReader, Source, Taken
from holdfast.engine.durations import Seconds, seconds
from holdfast.engine.keys import KeyWords, key_words
from holdfast.engine.operators.base import OperatorSnapshot
from holdfast.engine.state import STANDBY, StateTable
from holdfast.engine.state_rows import Field
from holdfast.errors import FlowError

ROWS_MAX = 65_536
ENTRIES_MAX = 2_000
"""Maximum folder entries examined in one call; the site does other work in between."""
KEYS_MAX = 1_000
"""Maximum files in one mark."""
FORGET_S = 7 * 86_400
"""The source forgets a file that has been missing this long; its name may then be reused."""
FORGOTTEN = -1
FORMATS = ("parquet", "csv", "json", "arrow")


class FolderSource(Source):
    """Reads the files that are added to a folder; see `follow`."""

    pushed = pulled = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: pa.Schema,
        format: str,
        pattern: str,
        interval: Seconds,
        until: str | None,
    ) -> None:
        if format not in FORMATS:
            raise FlowError(
                f"follow(): unknown format {format!r}", hint=f"use one of {list(FORMATS)}"
            )
        self.path, self.schema = Path(path).absolute(), schema
        self.format, self.pattern, self.until = format, pattern, until
        self.interval_s = seconds(interval, "follow(): interval")
        self.known: frozenset[str] = frozenset()
        """Files that are skipped because the flow already has their rows."""

    def resolve(self, replicas: int, known: Sequence[str] = ()) -> list[str] | None:
        files = [Path(unquote(urlsplit(name).path)) for name in known]
        here = self.path.resolve()
        return sorted(f.name for f in files if f.parent.resolve() == here) or None

    def resolved(self, values: Any) -> FolderSource:
        made = copy.copy(self)
        made.known = frozenset(values)
        return made

    def pull_reader(self) -> PullReader:
        return FolderReader(self)


class FolderReader(PullReader):
    """Reads files in the order of their modification time, then of their name.

    A table keeps the files that the flow has read, by name, with the size of each: 60 bytes a file.
    The table is handed over and stored like the state of an operator. The reader forgets a file
    that has been missing from the folder for `FORGET_S`. A file that is missing for a shorter time
    is not read again.
    """

    def __init__(self, source: FolderSource) -> None:
        self._source = source
        fields = {"size": Field(pa.int64()), "absent": Field(pa.int64()), "seen": Field(pa.int64())}
        self._table = StateTable(fields, 1)
        """By file: its size (-1 if unknown), since when it is missing (0 if it is present), and
        the last listing that had it, which only this replica uses."""
        self._noted = _Mark()
        """The file of which only a part has entered the flow."""
        self._file: str | None = None
        self._rows = 0  # rows of that file that were taken
        self._size = -1
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._queue: deque[str] = deque()
        """New files of the last listing."""
        self._changes: deque[str] = deque()
        """Marks about files that are missing now, or present again."""
        self._unnoted = 0
        """Marks given out and not yet noted. The reader lists the folder only when there are none,
        because only then the table has all files that were read."""
        self._listing: _Listing | None = None
        self._listings = 0
        self._next_listing_at = 0.0

    # --- reading --------------------------------------------------------------------------------

    def take(self) -> Taken | None:
        if not self._changes and self._batches is None and not self._open_next():
            if self._list():
                return None
            if not self._changes and not self._open_next():
                return [], ""
        if self._changes:
            self._unnoted += 1
            return [], self._changes.popleft()
        assert self._file is not None and self._batches is not None
        try:
            batch = next(self._batches, None)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        self._rows += batch.num_rows if batch else 0
        mark = _Mark(self._file, self._rows, batch is None, self._size)
        if batch is None:
            self._check_size(self._file, self._size)
            self._file, self._rows, self._size, self._batches = None, 0, -1, None
        self._unnoted += 1
        return ([batch] if batch else []), _encoded(mark)

    def _open_next(self) -> bool:
        """Open the current or the next file. Return False if there is none."""
        if self._file is None:
            if not self._queue:
                return False
            self._file = self._queue.popleft()
        path = self._source.path / self._file
        try:
            if self._size < 0:
                self._size = path.stat().st_size
            else:
                self._check_size(self._file, self._size)
            rows = ds.dataset(path, schema=self._source.schema, format=self._source.format)
            scanned = rows.scanner(batch_size=ROWS_MAX, use_threads=False).to_batches()
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        self._batches = _after(scanned, self._rows)
        return True

    def _check_size(self, name: str, size: int) -> None:
        """Raise if a file has changed since it was opened: it may have been read in part."""
        try:
            now = (self._source.path / name).stat().st_size
        except FileNotFoundError:
            return  # removing a file after it was opened is allowed
        if now != size:
            raise self._changed(name, size, now)

    def _changed(self, name: str, size: int, now: int) -> FlowError:
        return FlowError(
            f"{self._source.path / name} had {size} bytes when it was read, and has {now} now: "
            "the flow does not have the new rows",
            hint="files must be complete when they appear, and must not change: write them "
            "elsewhere, then rename. To continue, put the new rows into a file with another name "
            "and resume the flow",
        )

    def _unreadable(self, error: Exception) -> FlowError:
        return FlowError(
            f"cannot read {self._source.path / str(self._file)} as {self._source.format}: {error}",
            hint="files must be complete when they appear: write them elsewhere, then rename",
        )

    # --- listing --------------------------------------------------------------------------------

    def _list(self) -> bool:
        """List a part of the folder. Return True if the source has ended."""
        begun = time.monotonic()
        if self._unnoted or (self._listing is None and begun < self._next_listing_at):
            return False
        if self._listing is None:
            self._listings += 1
            self._listing = _Listing(self._source, self._listings)
        listing = self._listing
        names = listing.next(ENTRIES_MAX)
        if names:
            self._classify(listing, names)
        listing.busy_s += time.monotonic() - begun
        if not listing.is_complete:
            return False
        self._listing = None
        if self._source.interval_s:  # listing takes at most a tenth of the time
            wait_s = max(self._source.interval_s, 9 * listing.busy_s)
            self._next_listing_at = time.monotonic() + wait_s
        self._queue.extend(name for _, name in sorted(listing.unknown))
        self._note_missing(listing)
        return listing.is_last and not self._queue and not self._changes

    def _classify(self, listing: _Listing, names: dict[str, os.stat_result]) -> None:
        """Mark the files that the flow has as seen, and collect the others."""
        slots = self._table.find(key_words([pa.array(list(names), pa.string())]))
        for (name, stat), slot in zip(names.items(), slots.tolist(), strict=True):
            if slot >= 0:
                size = int(self._table["size"][slot])
                if size not in (-1, stat.st_size):
                    raise self._changed(name, size, stat.st_size)
            elif name not in self._source.known and name != self._noted.file:
                listing.unknown.append((stat.st_mtime_ns, name))
        self._table["seen"][slots[slots >= 0]] = listing.number

    def _note_missing(self, listing: _Listing) -> None:
        """Queue marks for files that are missing now, or present again. A listing without any
        file is ignored, because a folder that is not mounted looks the same."""
        if not listing.files:
            return
        table, now = self._table, int(time.time())
        slots = table.live()
        absent = table["absent"][slots]
        missing = table["seen"][slots] != listing.number
        for since, chosen in (
            (0, ~missing & (absent > 0)),
            (now, missing & (absent == 0)),
            (FORGOTTEN, missing & (absent > 0) & (absent < now - FORGET_S)),
        ):
            keys = table.keys(slots[chosen])
            for at in range(0, len(keys), KEYS_MAX):
                self._changes.append(_encoded(_Mark(absent=since, keys=keys[at : at + KEYS_MAX])))

    # --- marks ----------------------------------------------------------------------------------

    def check(self, mark: str) -> None:
        _decoded(mark)

    def note(self, mark: str, epoch: int) -> None:
        decoded = _decoded(mark)
        self._unnoted = max(0, self._unnoted - 1)
        if decoded.file is None:
            self._note_absent(decoded, epoch)
        elif decoded.done:
            self._add([decoded.file], decoded.size, epoch)
            self._noted = _Mark()
        else:
            self._noted = decoded

    def _add(self, names: list[str], size: int, epoch: int) -> None:
        slots = self._table.slots(key_words([pa.array(names, pa.string())]))
        self._table.touch(slots, epoch)
        self._table["size"][slots] = size
        self._table["absent"][slots] = 0
        self._table["seen"][slots] = self._listings

    def _note_absent(self, mark: _Mark, epoch: int) -> None:
        low, high = np.array(mark.keys, np.int64).reshape(-1, 2).T
        slots = self._table.find(KeyWords(low, high))
        slots = slots[slots >= 0]
        if mark.absent == FORGOTTEN:
            self._table.remove(slots)
        else:
            self._table.touch(slots, epoch)
            self._table["absent"][slots] = mark.absent

    def rewind(self) -> None:
        noted = self._noted
        self._file, self._rows, self._size = noted.file, noted.rows, noted.size
        self._batches, self._listing, self._unnoted = None, None, 0
        self._queue.clear()
        self._changes.clear()

    def save(self) -> str:
        return _encoded(self._noted)

    def restore(self, saved: str) -> None:
        position = msgspec.json.decode(saved, type=_SavedPosition)
        if isinstance(position.done, list) and position.done:  # stored without a table
            self._add(position.done, -1, 0)
        self._noted = _Mark(position.file, position.rows, False, position.size)
        self.rewind()

    def tables(self) -> dict[str, StateTable]:
        """The files that the flow has read, for other replicas and for the store."""
        return {"files": self._table}

    def snapshot(self, after: int | None = None, *, whose: str = STANDBY) -> OperatorSnapshot:
        return OperatorSnapshot(self.tables(), {}, after, whose=whose)

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        self._table.install(state["files"])


class _Listing:
    """Lists a folder in parts, because listing a large folder at once would take seconds."""

    def __init__(self, source: FolderSource, number: int) -> None:
        self.number = number
        self.files = 0
        self.unknown: list[tuple[int, str]] = []
        self.busy_s = 0.0
        self._source = source
        until = source.until
        self.is_last = until is not None and (source.path / until).exists()
        """Whether the file `until` existed before the listing began, so that no file is missed."""
        try:
            self._entries: Iterator[os.DirEntry[str]] = os.scandir(source.path)
        except FileNotFoundError:
            self._entries = iter(())
        self.is_complete = False

    def next(self, most: int) -> dict[str, os.stat_result]:
        """Examine up to `most` entries and return those that are files to read."""
        entries = list(itertools.islice(self._entries, most))
        self.is_complete = len(entries) < most
        found: dict[str, os.stat_result] = {}
        for entry in entries:
            shown = not entry.name.startswith((".", "_"))
            if shown and fnmatch.fnmatch(entry.name, self._source.pattern) and entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    found[entry.name] = entry.stat()
        self.files += len(found)
        return found


Word = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A position in the source. With a file: the rows taken of it, or all of them (`done`). Without
    a file: the files with these keys are missing since the time `absent`, in seconds, are present
    again (0), or are forgotten."""

    file: str | None = None
    rows: Annotated[int, msgspec.Meta(ge=0)] = 0
    done: bool = False
    size: Word = -1
    absent: Word = 0
    keys: list[tuple[Word, Word]] = []


class _SavedPosition(msgspec.Struct):
    """A stored mark, or a position that was stored by a version without a table."""

    file: str | None = None
    rows: int = 0
    size: int = -1
    done: list[str] | bool = False


def _encoded(mark: _Mark) -> str:
    return msgspec.json.encode(mark).decode()


def _decoded(mark: str) -> _Mark:
    try:
        return msgspec.json.decode(mark, type=_Mark)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def _after(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        known = min(rows, batch.num_rows)
        rows -= known
        if batch.num_rows > known:
            yield batch.slice(known)


class Lines(Source):
    """Reads JSON lines from a TCP server; see `lines`."""

    pushed = pulled = True

    def __init__(self, host: str, port: int, schema: pa.Schema) -> None:
        self.host, self.port, self.schema = host, port, schema

    def pull_reader(self) -> PullReader:
        return _LinesReader(self)

    def dry_run(self) -> Source:
        raise FlowError(
            f"cannot dry-run the source {self.host}:{self.port}: lines that are read here would be "
            "missing elsewhere",
            hint="use a separate server for the dry run",
        )


class _LinesReader(PullReader):
    """Reads a socket. It gives no marks, because a socket cannot be read again."""

    _CHUNK = 1 << 20
    _REDIAL_S = 0.5

    def __init__(self, source: Lines) -> None:
        self._source = source
        self._socket: socket.socket | None = None
        self._rest = b""
        self._dial_at = 0.0

    def take(self) -> Taken | None:
        if self._socket is None and not self._dial():
            return [], ""
        assert self._socket is not None
        data = b""
        try:
            data = self._socket.recv(self._CHUNK)
            over = not data
        except BlockingIOError:
            over = False
        except OSError:
            self.close()
            return [], ""
        self._rest += data
        cut = len(self._rest) if over else self._rest.rfind(b"\n") + 1
        whole, self._rest = self._rest[:cut], self._rest[cut:]
        if over and not whole:
            return None
        return (self._parsed(whole) if whole.strip() else []), ""

    def _dial(self) -> bool:
        if time.monotonic() < self._dial_at:
            return False
        self._dial_at = time.monotonic() + self._REDIAL_S
        try:
            self._socket = socket.create_connection((self._source.host, self._source.port), 1.0)
        except OSError:
            return False
        self._socket.setblocking(False)
        return True

    def _parsed(self, lines: bytes) -> list[pa.RecordBatch]:
        options = pa.json.ParseOptions(
            explicit_schema=self._source.schema, unexpected_field_behavior="ignore"
        )
        try:
            table = pa.json.read_json(io.BytesIO(lines), parse_options=options)
        except pa.ArrowException as error:
            where = f"{self._source.host}:{self._source.port}"
            raise FlowError(f"{where} sent a line that does not fit the schema: {error}") from error
        return list(table.combine_chunks().to_batches())

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def follow(
    path: str | os.PathLike[str],
    schema: pa.Schema,
    *,
    format: str = "parquet",
    pattern: str = "*",
    interval: Seconds = 0.1,
    until: str | None = None,
) -> Source:
    """Read all files of a folder, and those that are added to it, each file once.

    The source lists the folder every `interval` (a tenth of a second), or with 0 whenever it is
    asked for rows. It reads the new files of each listing in the order of their modification time.
    Files must be complete when they appear: write them elsewhere, or under a name that begins with
    ``.`` or ``_``, then rename. A file is identified by its name. If its size changes after it was
    read, the flow fails. A name may be reused a week after its file was removed. The source ends
    when a file named `until` exists and all others are read. All sites that may lead must reach the
    folder. A flow that is started with a history skips the files that the history was read from.
    """
    return FolderSource(path, schema, format, pattern, interval, until)


def lines(host: str, port: int, schema: pa.Schema) -> Source:
    """Read rows from a TCP server that sends one JSON object per line, until it closes the
    connection.

    For experiments only: a socket cannot be read again, so when a site dies, the rows that it has
    read and not yet sent to another site are lost.
    """
    return Lines(host, port, schema)
