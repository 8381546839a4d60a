"""The protocol by which writers of a parquet sink share a folder. At any moment only one writer can
publish, and each file it publishes continues the sequence of published epochs.

::

    out/part-000000000000.parquet      the rows of the epochs 0 to 6
        part-000000000007.parquet      from epoch 7 on: a file is named after its first epoch
        _SUCCESS                       present while no flow writes
        _holdfast/flow-000000          the first flow that wrote here
        _holdfast/flow-000001          the flow that continued after it
        _holdfast/writer-000001-...    the staging folder of the leading writer

**Fencing.** A writer prepares each file in a *staging folder* of its own, with a unique name, and
publishes it with a hard link. A new leader removes the staging folders of all writers before it,
and only then lists the published files. A link needs its source file, so a writer that was paused
at any call and wakes up later fails when it links, or when it creates another file. The same holds
for ``_SUCCESS``: a writer publishes it with a link from its staging folder, and a new leader
renames it into its own. No clock, lease or connection is involved.

**Order.** Staging folders are ordered by flow, then by the leader's term. A writer creates its own
first and lists the others afterwards. If two writers claim at the same time, either the later one
sees and removes the folder of the earlier one, or the earlier one sees the folder of the later one
and gives up. A flow gets its number by linking ``flow-N``, which succeeds only once. A flow that is
resumed after a stop is a new flow and also fences the writers of the stopped one. A flow that was
lost and resumed is the same flow in a later term.

**Chain.** A file's metadata records the flow, sink, incarnation and term that wrote it, its epochs,
and the number of files before it. A listing and a few footers are therefore enough to detect files
that are missing, torn, or written by another flow. A name can be linked only once, so even two
writers that are not fenced from each other (a user removed ``_holdfast``) cannot publish
overlapping ranges.

This module does not wait, retry or start threads; the writer does. Every method may raise `OSError`
and can be called again afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.connectors.sinks import Authority
from holdfast.errors import FlowError, SinkError, SinkRewoundError, require
from holdfast.storage.disk import NO_HARD_LINKS, Disk

log = logging.getLogger("holdfast.parquet")

HIDDEN = "_holdfast"
"""Spark, pyarrow and other readers skip names that begin with an underscore."""
SUCCESS = "_SUCCESS"
EMPTY = "part-empty.parquet"
"""The file of a result without rows, so that readers find a schema. It has no epochs."""
PREFIX = "holdfast."
_PART = re.compile(r"part-(\d{12})\.parquet")
_FLOW = re.compile(r"flow-(\d{6})")
_WRITER = re.compile(r"writer-(\d{6})-(\d{20})-([0-9a-f]{32})")


class Beginning(Enum):
    """Which writer, if any, a new writer succeeds."""

    FIRST = auto()
    """None: the flow starts with its first epoch."""
    AFTER_STOP = auto()
    """The writer of a stopped flow, which has published exactly the epochs known as durable."""
    TAKE_OVER = auto()
    """Another writer of the same flow, which may have published more than it reported."""


class Overtaken(Exception):
    """A writer of a later term has taken over; this writer must stop publishing."""


class StagingGone(Exception):
    """This writer's staging folder was removed, but no rows were and no other writer leads. The
    writer can claim again."""


class FlowMark(msgspec.Struct, frozen=True):
    """The content of a ``flow-N`` file."""

    flow: str
    sink: str
    incarnation: str


class ParquetPart(msgspec.Struct, frozen=True):
    """The metadata of a published file."""

    flow: str
    sink: str
    incarnation: str
    term: int
    first_epoch: int
    last_epoch: int
    number: int
    """Number of files published before this one."""

    def metadata(self) -> dict[str, str]:
        return {
            f"{PREFIX}{name}": str(value) for name, value in msgspec.structs.asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class Chain:
    """The published files."""

    end: int
    """The last epoch before the first gap."""
    number: int
    """Number of files up to that epoch."""
    name: str | None = None
    """The last of these files, if it still exists."""
    torn: tuple[str, ...] = ()
    """Files after `end`, the first of which cannot be read."""
    foreign: tuple[str, ...] = ()
    """Other parquet files, which a reader of the folder would read as rows."""


class PartFolder:
    """One writer's access to a folder."""

    def __init__(self, path: str, authority: Authority, *, allow_missing: bool, disk: Disk) -> None:
        self._path, self.authority, self._allow_missing = path, authority, allow_missing
        self._disk = disk
        self._id = uuid.uuid4().hex
        self._staging = ""
        self._staged: list[str] = []
        """Files in the staging folder that are no longer needed."""
        self._marked = False
        """Whether a claim has found or linked the ``flow-N`` file of this flow."""
        self.chain = Chain(-1, 0)

    # --- what a writer calls --------------------------------------------------------------------

    def claim(self, beginning: Beginning, durable: int) -> int:
        """Fence all earlier writers and return the last published epoch. `durable` is the last
        epoch that the flow knows to be published."""
        self._disk.make_folders(self._join(HIDDEN))
        flow = self._register(beginning, durable)
        self._make_staging(flow)
        self._fence(flow)
        self._refresh()
        self.chain = self._examine(beginning, durable)
        self._move_torn(self.chain.torn)
        with contextlib.suppress(FileNotFoundError):
            self._disk.rename(self._join(SUCCESS), self._new_path(""))
        self._disk.sync_folder(self._path)
        if self.chain.foreign:
            log.warning(
                "sink %r: readers of %s will also read %s, which this flow did not write",
                self.authority.sink,
                self._path,
                ", ".join(self.chain.foreign),
            )
        return self.chain.end

    def publish(self, batches: Sequence[pa.RecordBatch], schema: pa.Schema, last: int) -> int:
        """Publish a file with the rows of the epochs after the end of the chain, up to `last`.
        Return the last published epoch, which is not `last` if the file already existed."""
        require(last > self.chain.end, f"epoch {last} is already published")
        first, number = self.chain.end + 1, self.chain.number
        authority = self.authority
        part = ParquetPart(
            authority.flow,
            authority.sink,
            authority.incarnation,
            authority.term,
            first,
            last,
            number,
        )
        try:
            staged = self._stage(pa.Table.from_batches(batches, schema), part)
            self._check_chain()
            self._disk.link(staged, self._join(_name(first)))
        except FileExistsError:
            return self.look_again()
        except FileNotFoundError as error:
            self._explain(error)
        self._disk.sync_folder(self._path)
        self.chain = Chain(last, number + 1, _name(first), foreign=self.chain.foreign)
        self._tidy()
        return last

    def look_again(self) -> int:
        """Return the last published epoch, after a call whose outcome is unknown."""
        try:
            self.chain = self._examine(Beginning.TAKE_OVER, self.chain.end)
            self._move_torn(self.chain.torn)
            self._disk.sync_folder(self._path)
        except FileNotFoundError as error:
            self._explain(error)
        return self.chain.end

    def close(self, schema: pa.Schema) -> None:
        """Write ``_SUCCESS`` at the end of the flow, and an empty file if there are no rows."""
        authority = self.authority
        try:
            if self.chain.name is None and not any(map(_PART.fullmatch, self._names())):
                nothing = ParquetPart(
                    authority.flow, authority.sink, authority.incarnation, authority.term, 0, -1, 0
                )
                self._link_once(self._stage(schema.empty_table(), nothing), EMPTY)
            done = self._new_path("")
            with self._disk.create(done) as file:
                self._staged.append(done)
                self._disk.sync(file)
            self._link_once(done, SUCCESS)
        except FileNotFoundError as error:
            self._explain(error)
        self._disk.sync_folder(self._path)
        self._tidy()

    # --- claiming -------------------------------------------------------------------------------

    def _register(self, beginning: Beginning, durable: int) -> int:
        """Return the number of this flow in the folder; register the flow if it has none."""
        while True:
            marks = self._marks()
            ours = bool(marks) and self._is_ours(marks[-1][1])
            if not ours and marks and (self._marked or self._is_registered(marks)):
                raise self._taken_over(marks[-1][1])
            if not ours or beginning is not Beginning.TAKE_OVER:
                # Check first: a claim that is about to fail must not fence a running flow.
                self._examine(beginning, durable)
            number = marks[-1][0] + (not ours) if marks else 0
            if ours or self._link_mark(number):
                self._marked = True
                return number

    def _marks(self) -> list[tuple[int, FlowMark]]:
        """The flows that have written here, in order."""
        marks = []
        for name in self._disk.list(self._join(HIDDEN)):
            if match := _FLOW.fullmatch(name):
                data = self._disk.read(self._join(HIDDEN, name))
                marks.append((int(match[1]), self._decode_mark(name, data)))
        return sorted(marks, key=lambda mark: mark[0])

    def _decode_mark(self, name: str, data: bytes) -> FlowMark:
        try:
            return msgspec.json.decode(data, type=FlowMark)
        except msgspec.MsgspecError as error:
            raise SinkError(
                f"sink {self.authority.sink!r}: {self._join(HIDDEN, name)} is damaged: {error}",
                hint=f"if no flow writes to the folder, remove {self._join(HIDDEN)}",
            ) from error

    def _is_registered(self, marks: Sequence[tuple[int, FlowMark]]) -> bool:
        return any(mark.incarnation == self.authority.incarnation for _, mark in marks)

    def _is_ours(self, mark: FlowMark) -> bool:
        if mark.incarnation != self.authority.incarnation:
            return False
        if mark.sink != self.authority.sink:
            raise FlowError(
                f"sink {self.authority.sink!r}: the folder {self._path} belongs to sink "
                f"{mark.sink!r} of flow {mark.flow!r}",
                hint="give each sink a folder of its own",
            )
        return True

    def _link_mark(self, number: int) -> bool:
        """Register as the last flow of the folder. Return False if another flow was faster."""
        authority = self.authority
        staged = self._join(HIDDEN, f".{uuid.uuid4().hex}")
        with self._disk.create(staged) as file:
            mark = FlowMark(authority.flow, authority.sink, authority.incarnation)
            file.write(msgspec.json.encode(mark))
            self._disk.sync(file)
        try:
            self._disk.link(staged, self._join(HIDDEN, f"flow-{number:06d}"))
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in NO_HARD_LINKS:
                raise SinkError(
                    f"sink {authority.sink!r}: the file system of {self._path} has no hard links "
                    f"({error.strerror}), which the sink needs to fence earlier writers",
                    hint="use a folder on a POSIX file system: a local disk, or NFS",
                ) from error
            raise
        finally:
            with contextlib.suppress(OSError):
                self._disk.remove(staged)
        self._disk.sync_folder(self._join(HIDDEN))
        return True

    def _make_staging(self, flow: int) -> None:
        self._staging = self._join(
            HIDDEN, f"writer-{flow:06d}-{self.authority.term:020d}-{self._id}"
        )
        self._staged.clear()
        with contextlib.suppress(FileExistsError):  # left by a claim that failed half-way
            self._disk.make_folder(self._staging)
        self._disk.sync_folder(self._join(HIDDEN))

    def _fence(self, flow: int) -> None:
        """Remove the staging folders of all earlier writers. Raise if a later writer exists."""
        names = self._disk.list(self._join(HIDDEN))
        self._check_latest(flow, names)
        mine = (flow, self.authority.term)
        for name in names:
            if (match := _WRITER.fullmatch(name)) and (int(match[1]), int(match[2])) < mine:
                self._remove_staging(self._join(HIDDEN, name))
        self._disk.sync_folder(self._join(HIDDEN))

    def _check_latest(self, flow: int, names: Sequence[str]) -> None:
        if any((match := _FLOW.fullmatch(n)) and int(match[1]) > flow for n in names):
            raise self._taken_over(self._marks()[-1][1])
        terms = [(int(m[1]), int(m[2]), m[3]) for n in names if (m := _WRITER.fullmatch(n))]
        mine = (flow, self.authority.term)
        if any(term[:2] > mine for term in terms):
            raise Overtaken
        if any(term[:2] == mine and term[2] != self._id for term in terms):
            raise FlowError(
                f"sink {self.authority.sink!r}: flow {self.authority.flow!r} already writes to "
                f"{self._path}: was it started twice with the same secret?",
                hint="use a new secret for each start (HOLDFAST_SECRET)",
            )

    def _remove_staging(self, path: str) -> None:
        """Remove a staging folder. Its writer may add files until the folder is gone: retry."""
        while True:
            try:
                for name in self._disk.list(path):
                    with contextlib.suppress(FileNotFoundError):
                        self._disk.remove(f"{path}/{name}")
                self._disk.remove_folder(path)
            except FileNotFoundError:
                return  # another writer removed it
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return

    def _refresh(self) -> None:
        """Change the folder, so that an NFS client drops its cached listing."""
        probe = self._join(f".{uuid.uuid4().hex}")
        with self._disk.create(probe):
            pass
        self._disk.remove(probe)

    # --- published files ------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return self._disk.list(self._path)

    def _examine(self, beginning: Beginning, durable: int) -> Chain:
        """Return the published files. Raise if this writer cannot continue from them."""
        names = self._names()
        firsts = sorted(int(m[1]) for n in names if (m := _PART.fullmatch(n)))
        foreign = tuple(
            n
            for n in names
            if n.endswith(".parquet")
            and not n.startswith((".", "_"))
            and n != EMPTY
            and not _PART.fullmatch(n)
        )
        if beginning is not Beginning.TAKE_OVER and firsts:
            self._check_overtaken(_name(firsts[-1]))
        if beginning is Beginning.FIRST:
            self._expect_none([n for n in names if n in foreign or _PART.fullmatch(n)])
            return Chain(-1, 0)
        known = [f for f in firsts if f <= durable]
        chain = self._known_chain(known, durable)
        later = [f for f in firsts if f > durable]
        if beginning is Beginning.AFTER_STOP and later:
            raise self._written_after_stop(_name(later[0]))
        return self._later_chain(chain, later, foreign)

    def _check_overtaken(self, name: str) -> None:
        """Raise `Overtaken` if a later leader of the same flow has published this file."""
        with contextlib.suppress(FlowError):  # a file that this flow did not write
            part = self._part(name)
            if part is not None and part.incarnation == self.authority.incarnation:
                self._check_term(part)

    def _check_term(self, part: ParquetPart) -> None:
        if part.term > self.authority.term:
            raise Overtaken

    def _expect_none(self, names: Sequence[str]) -> None:
        if names:
            raise FlowError(
                f"sink {self.authority.sink!r}: the directory {self._path} already holds parquet "
                f"files ({names[0]})",
                hint="give each run a new directory, or empty this one first",
            )

    def _known_chain(self, known: Sequence[int], durable: int) -> Chain:
        """Return the chain of the files whose first epoch the flow knows to be durable."""
        if not known:
            if durable >= 0 and not self._allow_missing:
                raise self._rewound(durable, -1)
            return Chain(durable, 0)
        name = _name(known[-1])
        part = self._part(name)
        if part is None:
            raise SinkError(
                f"sink {self.authority.sink!r}: {self._join(name)} cannot be read as parquet, and "
                f"the flow no longer has its rows: epochs up to {durable} were durable",
                hint="restore the file from a backup; or move it away and set allow_missing=True",
            )
        self._check_author(name, part)
        if part.last_epoch > durable:
            raise self._written_after_stop(name)
        if not self._allow_missing and part.number + 1 != len(known):
            raise self._rewound(durable, self._first_gap(known))
        if not self._allow_missing and part.last_epoch < durable:
            raise self._rewound(durable, part.last_epoch)
        return Chain(durable, part.number + 1, name)

    def _later_chain(self, chain: Chain, later: Sequence[int], foreign: tuple[str, ...]) -> Chain:
        """Extend the chain with files that an earlier writer published but did not report."""
        end, number, last = chain.end, chain.number, chain.name
        torn: tuple[str, ...] = ()
        for at, first in enumerate(later):
            name = _name(first)
            part = self._part(name)
            if part is None:
                # None of these epochs is known to be durable, so the leader still has their rows.
                torn = tuple(map(_name, later[at:]))
                break
            self._check_author(name, part)
            if part.incarnation != self.authority.incarnation:
                raise self._written_after_stop(name)
            self._check_term(part)
            if first != end + 1 and not self._allow_missing:
                raise self._rewound(part.last_epoch, end)
            end, number, last = part.last_epoch, part.number + 1, name
        return Chain(end, number, last, torn, foreign)

    def _part(self, name: str) -> ParquetPart | None:
        """Return the metadata of a file, or None if the file is torn."""
        footer = self._disk.footer(self._join(name))
        try:
            metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer)).metadata or {}
        except (pa.ArrowException, OSError):  # the bytes are not parquet; the read succeeded
            return None
        start = PREFIX.encode()
        fields = {k[len(start) :].decode(): v for k, v in metadata.items() if k.startswith(start)}
        try:
            part = msgspec.convert(
                {k: v.decode() for k, v in fields.items()}, ParquetPart, strict=False
            )
        except (msgspec.ValidationError, UnicodeDecodeError) as error:
            raise FlowError(
                f"sink {self.authority.sink!r}: {self._join(name)} was not written by this version "
                f"of Holdfast ({error})",
                hint="move the file elsewhere, or give the flow a folder of its own",
            ) from error
        if _name(part.first_epoch) != name or part.last_epoch < part.first_epoch:
            raise FlowError(
                f"sink {self.authority.sink!r}: {self._join(name)} was renamed: it holds the "
                f"epochs {part.first_epoch} to {part.last_epoch}",
                hint="give the file its old name again, or move it elsewhere",
            )
        return part

    def _check_author(self, name: str, part: ParquetPart) -> None:
        if (part.flow, part.sink) != (self.authority.flow, self.authority.sink):
            raise FlowError(
                f"sink {self.authority.sink!r}: {self._join(name)} holds rows of sink "
                f"{part.sink!r} of flow {part.flow!r}, and this is flow {self.authority.flow!r}",
                hint="give each flow a folder of its own; a resumed flow must keep its name",
            )

    def _first_gap(self, known: Sequence[int]) -> int:
        """Return the last epoch before the first missing file."""
        end = -1
        for first in known:
            part = self._part(_name(first)) if first == end + 1 else None
            if part is None:
                break
            end = part.last_epoch
        return end

    def _check_chain(self) -> None:
        """Raise if the last file of the chain was removed."""
        last = self.chain.name
        if last is None or self._allow_missing or self._disk.exists(self._join(last)):
            return
        self._examine(Beginning.TAKE_OVER, self.chain.end)  # raises and names what is missing

    def _move_torn(self, torn: Sequence[str]) -> None:
        """Move torn files out of the readers' sight; the writer publishes their epochs again."""
        for name in torn:
            log.warning(
                "sink %r: %s is torn, or follows a torn file; its epochs are written again",
                self.authority.sink,
                self._join(name),
            )
            self._disk.rename(self._join(name), self._new_path(""))

    # --- the staging folder ---------------------------------------------------------------------

    def _join(self, *names: str) -> str:
        return "/".join((self._path, *names))

    def _new_path(self, suffix: str) -> str:
        """Return an unused path in the staging folder."""
        return f"{self._staging}/{uuid.uuid4().hex}{suffix}"

    def _stage(self, table: pa.Table, part: ParquetPart) -> str:
        """Write a file to the staging folder, sync it, and return its path."""
        self._tidy()
        staged = self._new_path(".parquet")
        metadata = {**(table.schema.metadata or {}), **part.metadata()}
        try:
            with self._disk.create(staged) as file:
                self._staged.append(staged)
                pq.write_table(table.replace_schema_metadata(metadata), file)
                self._disk.sync(file)
        except OSError:
            self._tidy()  # the disk may be full
            raise
        return staged

    def _link_once(self, staged: str, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            self._disk.link(staged, self._join(name))

    def _tidy(self) -> None:
        """Remove staged files; a published file also has its own name. A file that cannot be
        removed now is tried again later."""
        left = []
        for staged in self._staged:
            try:
                self._disk.remove(staged)
            except FileNotFoundError:
                pass
            except OSError:
                left.append(staged)
        self._staged = left

    def _explain(self, error: FileNotFoundError) -> NoReturn:
        """Raise the reason why a file or folder that a call needed is missing."""
        staging = self._staging.rpartition("/")[2]
        try:
            names, marks = self._disk.list(self._join(HIDDEN)), self._marks()
        except FileNotFoundError:
            names, marks = [], []
        if marks and not self._is_registered(marks):
            raise self._taken_over(marks[-1][1]) from error
        if marks and (match := _WRITER.fullmatch(staging)):
            self._check_latest(int(match[1]), names)
        if staging in names:
            raise error  # only the staged file is missing; the next attempt writes another
        try:
            self._examine(Beginning.TAKE_OVER, self.chain.end)
        except FileNotFoundError:
            raise self._rewound(self.chain.end, -1) from error
        raise StagingGone from error

    # --- errors ---------------------------------------------------------------------------------

    def _taken_over(self, by: FlowMark) -> FlowError:
        return FlowError(
            f"sink {self.authority.sink!r}: another flow, {by.flow!r} ({by.incarnation}), has "
            f"taken the folder {self._path} over from flow {self.authority.flow!r} "
            f"({self.authority.incarnation})",
            hint="give each run a directory of its own, and resume a flow only once",
        )

    def _written_after_stop(self, name: str) -> FlowError:
        return FlowError(
            f"sink {self.authority.sink!r}: {self._join(name)} was written after the flow was "
            "stopped",
            hint="another flow has continued there; give this one a directory of its own",
        )

    def _rewound(self, committed: int, found: int) -> SinkRewoundError:
        return SinkRewoundError(
            self.authority.sink,
            committed,
            found,
            f"files were removed from {self._path}, or it was restored from an older backup, or is "
            f"not the same folder on all machines: put the files with the epochs {found + 1} to "
            f"{committed} back and resume the flow. If they are missing on purpose (moved "
            "elsewhere, or a new folder), set parquet(..., allow_missing=True)",
        )


def _name(first: int) -> str:
    return f"part-{first:012d}.parquet"
