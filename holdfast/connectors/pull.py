"""Sources that only one site reads: a folder to which files are added, and a socket.

What they give cannot be read twice by two sites and be the same, so the leading replica of the
ingress reads, and gives every push batch to the other replicas before it enters the flow (see
`site/push.py`). With it goes a *mark*: how far reading has come. All replicas note it when the rows
have entered, and whoever leads next goes on from there.
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
from holdfast.engine.state import STANDBY, Field, StateTable
from holdfast.errors import FlowError

ROWS_MAX = 65_536
LISTED_MAX = 2_000
"""So many entries of a folder are looked at before other work goes on."""
KEYS_MAX = 1_000
"""So many files are named in one mark."""
FORGET_S = 7 * 86_400
"""A file that has been missing for so long is forgotten, and its name may be used again."""
FORGOTTEN = -1
FORMATS = ("parquet", "csv", "json", "arrow")


class Folder(Source):
    """Files that are added to a folder, one after another."""

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
            raise FlowError(f"follow(): format {format!r}", hint=f"it is one of {list(FORMATS)}")
        self.path, self.schema = Path(path).absolute(), schema
        self.format, self.pattern, self.until = format, pattern, until
        self.interval_s = seconds(interval, "follow(): interval")
        self.known: frozenset[str] = frozenset()
        """Files that are not to be read: the flow has their rows."""

    def resolve(self, replicas: int, known: Sequence[str] = ()) -> list[str] | None:
        files = [Path(unquote(urlsplit(name).path)) for name in known]
        here = self.path.resolve()
        return sorted(f.name for f in files if f.parent.resolve() == here) or None

    def resolved(self, values: Any) -> Folder:
        made = copy.copy(self)
        made.known = frozenset(values)
        return made

    def pull_reader(self) -> PullReader:
        return FolderReader(self)


class FolderReader(PullReader):
    """Files in the order in which they were last changed; of equals, by name.

    Which files the flow has is in a table, by name, with the size that each had: 60 bytes a file,
    which go to other replicas and to the store like the state of an operator. A file is forgotten
    when it has been missing from the folder for `FORGET_S`. Until then it does not matter whether
    a listing shows it.
    """

    def __init__(self, source: Folder) -> None:
        self._source = source
        fields = {"size": Field(pa.int64()), "absent": Field(pa.int64()), "seen": Field(pa.int64())}
        self._table = StateTable(fields, 1)
        """By file: its size (-1 if that is not known), since when it is missing (0 if it is not),
        and the last listing here that had it, which nobody else needs to know."""
        self._noted = _Mark()
        """The file that has entered the flow in part."""
        self._file: str | None = None
        self._rows = 0  # of that file, how many were taken
        self._size = -1
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._queue: deque[str] = deque()
        """Files that the last listing has found."""
        self._changes: deque[str] = deque()
        """Marks: which files are missing now, or are there again."""
        self._unnoted = 0
        """How many marks were given out. Nothing is listed before all of them are noted, as only
        then the table says which files are known."""
        self._listing: _Listing | None = None
        self._listings = 0
        self._look_at = 0.0

    # --- reading --------------------------------------------------------------------------------

    def take(self) -> Taken | None:
        if not self._changes and self._batches is None and not self._open_next():
            if self._look():
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
        """Begin with a file, or go on with it; False if there is none."""
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
        """A file that is written to after it was opened may have been read in part."""
        try:
            now = (self._source.path / name).stat().st_size
        except FileNotFoundError:
            return  # removed, which is nobody's business once it was opened
        if now != size:
            raise self._changed(name, size, now)

    def _changed(self, name: str, size: int, now: int) -> FlowError:
        return FlowError(
            f"{self._source.path / name} had {size} bytes when it was read, and has {now} now: "
            "the flow does not have what is new in it",
            hint="files must be whole when they appear, and stay as they are: write elsewhere, and "
            "rename. To go on, give what is new another name and resume the flow",
        )

    def _unreadable(self, error: Exception) -> FlowError:
        return FlowError(
            f"cannot read {self._source.path / str(self._file)} as {self._source.format}: {error}",
            hint="files must be whole when they appear: write elsewhere, and rename",
        )

    # --- listing --------------------------------------------------------------------------------

    def _look(self) -> bool:
        """List some of the folder; True if there is nothing to read and will never be."""
        begun = time.monotonic()
        if self._unnoted or (self._listing is None and begun < self._look_at):
            return False
        if self._listing is None:
            self._listings += 1
            self._listing = _Listing(self._source, self._listings)
        listing = self._listing
        names = listing.next(LISTED_MAX)
        if names:
            self._sort_out(listing, names)
        listing.busy_s += time.monotonic() - begun
        if not listing.is_complete:
            return False
        self._listing = None
        if self._source.interval_s:  # and never more than a tenth of the time
            self._look_at = time.monotonic() + max(self._source.interval_s, 9 * listing.busy_s)
        self._queue.extend(name for _, name in sorted(listing.unknown))
        self._note_missing(listing)
        return listing.is_last and not self._queue and not self._changes

    def _sort_out(self, listing: _Listing, names: dict[str, os.stat_result]) -> None:
        """Tell files that the flow has from others."""
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
        """Find out which files have gone, or are there again. A listing without any file says
        nothing: that is what a folder looks like that is not mounted."""
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

    # --- what has entered the flow --------------------------------------------------------------

    def note(self, mark: str, epoch: int) -> None:
        try:
            said = msgspec.json.decode(mark, type=_Mark)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        self._unnoted = max(0, self._unnoted - 1)
        if said.file is None:
            self._note_absent(said, epoch)
        elif said.done:
            self._add([said.file], said.size, epoch)
            self._noted = _Mark()
        else:
            self._noted = said

    def _add(self, names: list[str], size: int, epoch: int) -> None:
        slots = self._table.slots(key_words([pa.array(names, pa.string())]))
        self._table.touch(slots, epoch)
        self._table["size"][slots] = size
        self._table["absent"][slots] = 0
        self._table["seen"][slots] = self._listings

    def _note_absent(self, said: _Mark, epoch: int) -> None:
        low, high = np.array(said.keys, np.int64).reshape(-1, 2).T
        slots = self._table.find(KeyWords(low, high))
        slots = slots[slots >= 0]
        if said.absent == FORGOTTEN:
            self._table.remove(slots)
        else:
            self._table.touch(slots, epoch)
            self._table["absent"][slots] = said.absent

    def rewind(self) -> None:
        said = self._noted
        self._file, self._rows, self._size = said.file, said.rows, said.size
        self._batches, self._listing, self._unnoted = None, None, 0
        self._queue.clear()
        self._changes.clear()

    def save(self) -> str:
        return _encoded(self._noted)

    def restore(self, saved: str) -> None:
        said = msgspec.json.decode(saved, type=_Saved)
        if isinstance(said.done, list) and said.done:  # as it was stored before there was a table
            self._add(said.done, -1, 0)
        self._noted = _Mark(said.file, said.rows, False, said.size)
        self.rewind()

    def tables(self) -> dict[str, StateTable]:
        """Which files the flow has, for other replicas and for the store."""
        return {"files": self._table}

    def snapshot(self, after: int | None = None, *, whose: str = STANDBY) -> OperatorSnapshot:
        return OperatorSnapshot(self.tables(), {}, after, whose=whose)

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        self._table.install(state["files"])


class _Listing:
    """The files of a folder, some at a time: of a large one all at once would take seconds."""

    def __init__(self, source: Folder, number: int) -> None:
        self.number = number
        self.files = 0
        self.unknown: list[tuple[int, str]] = []
        self.busy_s = 0.0
        self._source = source
        until = source.until
        self.is_last = until is not None and (source.path / until).exists()
        """Whether all files are there: said before the first of them is looked at."""
        try:
            self._entries: Iterator[os.DirEntry[str]] = os.scandir(source.path)
        except FileNotFoundError:
            self._entries = iter(())
        self.is_complete = False

    def next(self, most: int) -> dict[str, os.stat_result]:
        """Of so many entries, those that are files to be read."""
        entries = list(itertools.islice(self._entries, most))
        self.is_complete = len(entries) < most
        found: dict[str, os.stat_result] = {}
        for entry in entries:
            shown = not entry.name.startswith((".", "_"))
            if shown and fnmatch.fnmatch(entry.name, self._source.pattern) and entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # it has just been removed
                    found[entry.name] = entry.stat()
        self.files += len(found)
        return found


Word = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """So many rows of a file were taken, or all (`done`); or, without a file: these files have been
    missing since a time, in seconds (0: they are there), or are forgotten."""

    file: str | None = None
    rows: Annotated[int, msgspec.Meta(ge=0)] = 0
    done: bool = False
    size: Word = -1
    absent: Word = 0
    keys: list[tuple[Word, Word]] = []


class _Saved(msgspec.Struct):
    """A mark as it is stored, or the position as it was stored before there was a table."""

    file: str | None = None
    rows: int = 0
    size: int = -1
    done: list[str] | bool = False


def _encoded(mark: _Mark) -> str:
    return msgspec.json.encode(mark).decode()


def _after(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        known = min(rows, batch.num_rows)
        rows -= known
        if batch.num_rows > known:
            yield batch.slice(known)


class Lines(Source):
    """JSON lines from a TCP server."""

    pushed = pulled = True

    def __init__(self, host: str, port: int, schema: pa.Schema) -> None:
        self.host, self.port, self.schema = host, port, schema

    def pull_reader(self) -> PullReader:
        return _LinesReader(self)

    def dry_run(self) -> Source:
        raise FlowError(
            f"lines of {self.host}:{self.port} that are read here may be missing elsewhere",
            hint="try the flow with a server that gives them for this",
        )


class _LinesReader(PullReader):
    """Nothing can be asked for again of a socket: there is no mark."""

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
            raise FlowError(f"{where} sent what is no JSON of the schema: {error}") from error
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
    """The rows of all files in a folder, and of those that are added to it, each file once.

    The folder is listed every `interval` (a tenth of a second); with 0 whenever there is time.
    Files are taken in the order in which they were last changed, of those that a listing finds.
    They must be whole when they appear: write them elsewhere, or under a name that begins with
    ``.`` or ``_``, and rename. A file is known by its name: one whose size is another than when it
    was read is an error, and a name may be used again a week after its file was removed. When a
    file named `until` is there and all others are read, the source ends. All sites that may lead
    must reach the folder. Of a flow that is started with a history, files that the history was
    read from are left out.
    """
    return Folder(path, schema, format, pattern, interval, until)


def lines(host: str, port: int, schema: pa.Schema) -> Source:
    """Rows from a TCP server that sends a JSON object a line; the end of the connection is the end.

    For trying things out: what a site has read of a socket when it dies, and no other has yet, is
    lost, as a socket gives nothing twice.
    """
    return Lines(host, port, schema)
