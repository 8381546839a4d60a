"""Sources that only one site reads: a folder to which files are added, and a socket.

What they give cannot be read twice by two sites and be the same, so the leading copy of the ingress
reads, and gives every portion to the other copies before it enters the flow (see `site/feed.py`).
With it goes a *mark*: how far reading has come. Whoever leads next goes on from there.
"""

from __future__ import annotations

import copy
import fnmatch
import io
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.json

from holdfast.errors import FlowError
from holdfast.flow.sources import Source, Taken, Tap

ROWS_MAX = 65_536
FORMATS = ("parquet", "csv", "json", "arrow")


class Folder(Source):
    """Files that are added to a folder, one after another."""

    fed = tapped = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: pa.Schema,
        format: str,
        pattern: str,
        every_s: float,
        until: str | None,
    ) -> None:
        if format not in FORMATS:
            raise FlowError(f"follow(): format {format!r}", hint=f"it is one of {list(FORMATS)}")
        self.path, self.schema = Path(path).absolute(), schema
        self.format, self.pattern, self.every_s, self.until = format, pattern, every_s, until
        self.known: frozenset[str] = frozenset()
        """Files that are not to be read: the flow has their rows."""

    def settle(self, copies: int, known: Sequence[str] = ()) -> list[str] | None:
        files = [Path(unquote(urlsplit(name).path)) for name in known]
        here = self.path.resolve()
        return sorted(f.name for f in files if f.parent.resolve() == here) or None

    def settled(self, values: Any) -> Folder:
        made = copy.copy(self)
        made.known = frozenset(values)
        return made

    def tap(self) -> Tap:
        return _FolderTap(self)


class _FolderTap(Tap):
    """Files in the order in which they were last changed; of equals, by name."""

    def __init__(self, source: Folder) -> None:
        self._source = source
        self._done = set(source.known)
        self._file: str | None = None
        self._rows = 0  # of that file, how many were taken
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._look_at = 0.0

    def take(self) -> Taken | None:
        if self._batches is None and not self._open_next():
            return None if self._is_over() else ([], "")
        assert self._file is not None and self._batches is not None
        try:
            batch = next(self._batches, None)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        mark = {"file": self._file, "rows": self._rows + (batch.num_rows if batch else 0)}
        self.note(json.dumps(mark | {"done": batch is None}))
        return ([batch] if batch else []), json.dumps(mark | {"done": batch is None})

    def _open_next(self) -> bool:
        """Begin with a file, or go on with it; False if there is none."""
        if self._file is None:
            if time.monotonic() < self._look_at:
                return False
            self._look_at = time.monotonic() + self._source.every_s
            self._file = next(iter(self._waiting()), None)
        if self._file is None:
            return False
        path = self._source.path / self._file
        try:
            rows = ds.dataset(path, schema=self._source.schema, format=self._source.format)
            scanned = rows.scanner(batch_size=ROWS_MAX, use_threads=False).to_batches()
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        self._batches = _after(scanned, self._rows)
        return True

    def _unreadable(self, error: Exception) -> FlowError:
        return FlowError(
            f"cannot read {self._source.path / str(self._file)} as {self._source.format}: {error}",
            hint="files must be whole when they appear: write elsewhere, and rename",
        )

    def _waiting(self) -> list[str]:
        """The files that are there and were not read."""
        found = []
        try:
            entries = list(os.scandir(self._source.path))
        except FileNotFoundError:
            return []
        for entry in entries:
            shown = not entry.name.startswith((".", "_"))
            if shown and fnmatch.fnmatch(entry.name, self._source.pattern) and entry.is_file():
                found.append((entry.stat().st_mtime_ns, entry.name))
        self._done &= {name for _, name in found}  # a file that was removed may come again
        return [name for _, name in sorted(found) if name not in self._done]

    def _is_over(self) -> bool:
        until = self._source.until
        return (
            until is not None
            and self._file is None
            and (self._source.path / until).exists()
            and not self._waiting()
        )

    def note(self, mark: str) -> None:
        said = json.loads(mark)
        self._file, self._rows = said["file"], said["rows"]
        if said["done"]:
            self._done.add(said["file"])
            self._file, self._rows, self._batches = None, 0, None

    def save(self) -> str:
        return json.dumps({"done": sorted(self._done), "file": self._file, "rows": self._rows})

    def restore(self, saved: str) -> None:
        said = json.loads(saved)
        self._done, self._file, self._rows = set(said["done"]), said["file"], said["rows"]
        self._batches = None


def _after(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        known = min(rows, batch.num_rows)
        rows -= known
        if batch.num_rows > known:
            yield batch.slice(known)


class Lines(Source):
    """JSON lines from a TCP server."""

    fed = tapped = True

    def __init__(self, host: str, port: int, schema: pa.Schema) -> None:
        self.host, self.port, self.schema = host, port, schema

    def tap(self) -> Tap:
        return _LinesTap(self)

    def aside(self) -> Source:
        raise FlowError(
            f"lines of {self.host}:{self.port} that are read here may be missing elsewhere",
            hint="try the flow with a server that gives them for this",
        )


class _LinesTap(Tap):
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
    every_s: float = 0.1,
    until: str | None = None,
) -> Source:
    """The rows of all files in a folder, and of those that are added to it, each file once.

    Files are taken in the order in which they were last changed. They must be whole when they
    appear: write them elsewhere, or under a name that begins with ``.`` or ``_``, and rename. When
    a file named `until` is there and all others are read, the source ends. All sites that may
    lead must reach the folder. Of a flow that is started with a history, files that the history
    was read from are left out.
    """
    return Folder(path, schema, format, pattern, every_s, until)


def lines(host: str, port: int, schema: pa.Schema) -> Source:
    """Rows from a TCP server that sends a JSON object a line; the end of the connection is the end.

    For trying things out: what a site has read of a socket when it dies, and no other has yet, is
    lost, as a socket gives nothing twice.
    """
    return Lines(host, port, schema)
