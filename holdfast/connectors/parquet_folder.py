"""The protocol by which writers of a parquet sink share a folder: at any moment one of them can
publish, and what it publishes follows on what is there.

::

    out/part-000000000000.parquet      the rows of the epochs 0 to 6
        part-000000000007.parquet      and from 7 on: a file is named after its first epoch
        _SUCCESS                       while no flow writes
        _holdfast/flow-000000          a flow that wrote here, and the one that came after it
        _holdfast/flow-000001
        _holdfast/writer-000001-...    the staging folder of the writer that leads

**Fencing.** A writer prepares each file in a *staging folder* of its own, with a unique name, and
publishes it with a hard link. A new leader removes the staging folders of all writers before it,
and only then lists what is published. A link needs its source. So a writer that was stopped at any
call, and wakes up later, fails at its link or at creating another file. The same holds for
``_SUCCESS``, which is linked out of the staging folder and renamed into it. No clock, lease or
connection is involved.

**Order.** Staging folders are ordered by flow, then by the leader's term. A writer creates its own
first and lists the others afterwards. So of two that claim at the same time, either the later one
sees and removes the folder of the earlier, or the earlier one sees that of the later and gives up.
Flows get their numbers by linking ``flow-N``, which succeeds once. A flow that is resumed after a
stop is another flow, and fences the writers of the earlier one, too. A flow that was lost and
resumed is the same flow in a later term.

**Chain.** A file's metadata says which flow, sink, incarnation and term wrote it, which epochs it
has, and how many files precede it. A listing and a few footers therefore tell whether files are
missing, torn, or of somebody else. Since names are taken once, even two writers that are not fenced
from each other (somebody removed ``_holdfast``) cannot publish ranges that overlap.

Nothing here waits, retries or has a thread; that is the writer's. Every method may raise `OSError`
and can then be called again.
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
"""Spark, pyarrow and others leave out names that begin so."""
SUCCESS = "_SUCCESS"
EMPTY = "part-empty.parquet"
"""Has no epoch: a result without any must be readable, too."""
PREFIX = "holdfast."
_PART = re.compile(r"part-(\d{12})\.parquet")
_FLOW = re.compile(r"flow-(\d{6})")
_WRITER = re.compile(r"writer-(\d{6})-(\d{20})-([0-9a-f]{32})")


class Beginning(Enum):
    """In whose place a writer begins."""

    FIRST = auto()
    """Of none: the flow starts with its first epoch."""
    AFTER_STOP = auto()
    """Of a flow that was stopped: it has published exactly what the new one is told."""
    TAKE_OVER = auto()
    """Of another writer of the same flow, which may have published more than it has said."""


class Overtaken(Exception):
    """A writer of a later term has taken over; this one must keep quiet."""


class StagingGone(Exception):
    """Somebody removed this writer's staging folder, but no rows, and no other writer leads: it can
    claim again."""


class FlowMark(msgspec.Struct, frozen=True):
    """What a ``flow-N`` file has."""

    flow: str
    sink: str
    incarnation: str


class Part(msgspec.Struct, frozen=True):
    """What the metadata of a published file says."""

    flow: str
    sink: str
    incarnation: str
    term: int
    first_epoch: int
    last_epoch: int
    number: int
    """So many files were published before it."""

    def metadata(self) -> dict[str, str]:
        return {
            f"{PREFIX}{name}": str(value) for name, value in msgspec.structs.asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class Chain:
    """What is published."""

    end: int
    """The last epoch without a gap."""
    number: int
    """So many files lead up to there."""
    name: str | None = None
    """The last of them, if it is still there."""
    torn: tuple[str, ...] = ()
    """Files beyond it, the first of which cannot be read."""
    foreign: tuple[str, ...] = ()
    """What else a reader of the folder would take for rows."""


class PartFolder:
    """One writer's hold on a folder."""

    def __init__(self, path: str, whose: Authority, *, allow_missing: bool, disk: Disk) -> None:
        self._path, self.whose, self._allow_missing = path, whose, allow_missing
        self._disk = disk
        self._id = uuid.uuid4().hex
        self._staging = ""
        self._staged: list[str] = []
        """Files in the staging folder that are not needed any more."""
        self._marked = False
        """Whether the folder has, or had, the mark of this flow."""
        self.chain = Chain(-1, 0)

    # --- what a writer calls --------------------------------------------------------------------

    def claim(self, beginning: Beginning, durable: int) -> int:
        """Take the place of all writers before this one. The answer is the last epoch that is
        published; `durable` is the last one of which the flow knows that it was."""
        self._disk.make_folders(self._in(HIDDEN))
        flow = self._enter(beginning, durable)
        self._make_staging(flow)
        self._fence(flow)
        self._refresh()
        self.chain = self._examine(beginning, durable)
        self._set_aside(self.chain.torn)
        with contextlib.suppress(FileNotFoundError):
            self._disk.rename(self._in(SUCCESS), self._fresh(""))
        self._disk.sync_folder(self._path)
        if self.chain.foreign:
            log.warning(
                "sink %r: readers of %s will also find %s, which this flow has not written",
                self.whose.sink,
                self._path,
                ", ".join(self.chain.foreign),
            )
        return self.chain.end

    def publish(self, batches: Sequence[pa.RecordBatch], schema: pa.Schema, last: int) -> int:
        """Add a file with the rows of the epochs after the end of the chain, up to `last`. The
        answer is the last epoch that is published: another one if the file was there already."""
        require(last > self.chain.end, f"epoch {last} is published")
        first, number = self.chain.end + 1, self.chain.number
        whose = self.whose
        part = Part(whose.flow, whose.sink, whose.incarnation, whose.term, first, last, number)
        try:
            staged = self._stage(pa.Table.from_batches(batches, schema), part)
            self._check_chain()
            self._disk.link(staged, self._in(_name(first)))
        except FileExistsError:
            return self.look_again()
        except FileNotFoundError as error:
            self._explain(error)
        self._disk.sync_folder(self._path)
        self.chain = Chain(last, number + 1, _name(first), foreign=self.chain.foreign)
        self._tidy()
        return last

    def look_again(self) -> int:
        """What is published, after a call of which it is not known whether it had an effect."""
        try:
            self.chain = self._examine(Beginning.TAKE_OVER, self.chain.end)
            self._set_aside(self.chain.torn)
            self._disk.sync_folder(self._path)
        except FileNotFoundError as error:
            self._explain(error)
        return self.chain.end

    def close(self, schema: pa.Schema) -> None:
        """The flow has ended: say so to readers, who must find something to read."""
        whose = self.whose
        try:
            if self.chain.name is None and not any(map(_PART.fullmatch, self._names())):
                nothing = Part(whose.flow, whose.sink, whose.incarnation, whose.term, 0, -1, 0)
                self._link_once(self._stage(schema.empty_table(), nothing), EMPTY)
            done = self._fresh("")
            with self._disk.create(done) as file:
                self._staged.append(done)
                self._disk.sync(file)
            self._link_once(done, SUCCESS)
        except FileNotFoundError as error:
            self._explain(error)
        self._disk.sync_folder(self._path)
        self._tidy()

    # --- claiming -------------------------------------------------------------------------------

    def _enter(self, beginning: Beginning, durable: int) -> int:
        """The number of this flow in the folder, which it gets now if it has none."""
        while True:
            marks = self._marks()
            ours = bool(marks) and self._is_ours(marks[-1][1])
            if not ours and marks and (self._marked or self._is_among(marks)):
                raise self._taken(marks[-1][1])
            if not ours or beginning is not Beginning.TAKE_OVER:
                # It must not end what runs here only to find that it has no business here.
                self._examine(beginning, durable)
            number = marks[-1][0] + (not ours) if marks else 0
            if ours or self._mark(number):
                self._marked = True
                return number

    def _marks(self) -> list[tuple[int, FlowMark]]:
        """The flows that have written here, in order."""
        found = []
        for name in self._disk.list(self._in(HIDDEN)):
            if match := _FLOW.fullmatch(name):
                data = self._disk.read(self._in(HIDDEN, name))
                found.append((int(match[1]), self._decoded(name, data)))
        return sorted(found, key=lambda mark: mark[0])

    def _decoded(self, name: str, data: bytes) -> FlowMark:
        try:
            return msgspec.json.decode(data, type=FlowMark)
        except msgspec.MsgspecError as error:
            raise SinkError(
                f"sink {self.whose.sink!r}: {self._in(HIDDEN, name)} is damaged: {error}",
                hint=f"if no flow writes to the folder, remove {self._in(HIDDEN)}",
            ) from error

    def _is_among(self, marks: Sequence[tuple[int, FlowMark]]) -> bool:
        return any(mark.incarnation == self.whose.incarnation for _, mark in marks)

    def _is_ours(self, mark: FlowMark) -> bool:
        if mark.incarnation != self.whose.incarnation:
            return False
        if mark.sink != self.whose.sink:
            raise FlowError(
                f"sink {self.whose.sink!r}: the folder {self._path} is that of sink "
                f"{mark.sink!r} of flow {mark.flow!r}",
                hint="each sink needs a folder of its own",
            )
        return True

    def _mark(self, number: int) -> bool:
        """Become the last flow of the folder, unless another one just has."""
        whose = self.whose
        staged = self._in(HIDDEN, f".{uuid.uuid4().hex}")
        with self._disk.create(staged) as file:
            mark = FlowMark(whose.flow, whose.sink, whose.incarnation)
            file.write(msgspec.json.encode(mark))
            self._disk.sync(file)
        try:
            self._disk.link(staged, self._in(HIDDEN, f"flow-{number:06d}"))
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in NO_HARD_LINKS:
                raise SinkError(
                    f"sink {whose.sink!r}: the file system of {self._path} has no hard links "
                    f"({error.strerror}), and without them writers cannot be told apart",
                    hint="use a folder of a POSIX file system: a local disk, or NFS",
                ) from error
            raise
        finally:
            with contextlib.suppress(OSError):
                self._disk.remove(staged)
        self._disk.sync_folder(self._in(HIDDEN))
        return True

    def _make_staging(self, flow: int) -> None:
        self._staging = self._in(HIDDEN, f"writer-{flow:06d}-{self.whose.term:020d}-{self._id}")
        self._staged.clear()
        with contextlib.suppress(FileExistsError):  # a claim that failed half-way made it
            self._disk.make_folder(self._staging)
        self._disk.sync_folder(self._in(HIDDEN))

    def _fence(self, flow: int) -> None:
        """Remove the staging folders of all earlier writers, unless there is a later one."""
        names = self._disk.list(self._in(HIDDEN))
        self._check_latest(flow, names)
        mine = (flow, self.whose.term)
        for name in names:
            if (match := _WRITER.fullmatch(name)) and (int(match[1]), int(match[2])) < mine:
                self._remove_staging(self._in(HIDDEN, name))
        self._disk.sync_folder(self._in(HIDDEN))

    def _check_latest(self, flow: int, names: Sequence[str]) -> None:
        if any((match := _FLOW.fullmatch(n)) and int(match[1]) > flow for n in names):
            raise self._taken(self._marks()[-1][1])
        terms = [(int(m[1]), int(m[2]), m[3]) for n in names if (m := _WRITER.fullmatch(n))]
        mine = (flow, self.whose.term)
        if any(term[:2] > mine for term in terms):
            raise Overtaken
        if any(term[:2] == mine and term[2] != self._id for term in terms):
            raise FlowError(
                f"sink {self.whose.sink!r}: flow {self.whose.flow!r} writes to {self._path} "
                f"already: was it started twice with one secret?",
                hint="each start needs a secret of its own (HOLDFAST_SECRET)",
            )

    def _remove_staging(self, path: str) -> None:
        """Its writer may be adding files meanwhile; once the folder is gone it cannot."""
        while True:
            try:
                for name in self._disk.list(path):
                    with contextlib.suppress(FileNotFoundError):
                        self._disk.remove(f"{path}/{name}")
                self._disk.remove_folder(path)
            except FileNotFoundError:
                return  # somebody else removed it
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return

    def _refresh(self) -> None:
        """Change the folder, so that an NFS client forgets what it believes to be in it."""
        probe = self._in(f".{uuid.uuid4().hex}")
        with self._disk.create(probe):
            pass
        self._disk.remove(probe)

    # --- what is published ----------------------------------------------------------------------

    def _names(self) -> list[str]:
        return self._disk.list(self._path)

    def _examine(self, beginning: Beginning, durable: int) -> Chain:
        """What is published, if it is what this writer can go on from."""
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
            raise self._from_after(_name(later[0]))
        return self._later_chain(chain, later, foreign)

    def _check_overtaken(self, name: str) -> None:
        """Before it has claimed: whether a later leader of the same flow has published."""
        with contextlib.suppress(FlowError):  # a file of somebody else
            part = self._part(name)
            if part is not None and part.incarnation == self.whose.incarnation:
                self._check_term(part)

    def _check_term(self, part: Part) -> None:
        if part.term > self.whose.term:
            raise Overtaken

    def _expect_none(self, names: Sequence[str]) -> None:
        if names:
            raise FlowError(
                f"sink {self.whose.sink!r}: the directory {self._path} already holds parquet files"
                f" ({names[0]})",
                hint="give each run a directory of its own, or empty it first",
            )

    def _known_chain(self, known: Sequence[int], durable: int) -> Chain:
        """Of the files that begin with an epoch that the flow knows to be durable."""
        if not known:
            if durable >= 0 and not self._allow_missing:
                raise self._rewound(durable, -1)
            return Chain(durable, 0)
        name = _name(known[-1])
        part = self._part(name)
        if part is None:
            raise SinkError(
                f"sink {self.whose.sink!r}: {self._in(name)} cannot be read as parquet, and the "
                f"flow has its rows no more: it knows epochs up to {durable} as durable",
                hint="restore the file from a replica; or move it away, and say allow_missing=True",
            )
        self._check_author(name, part)
        if part.last_epoch > durable:
            raise self._from_after(name)
        if not self._allow_missing and part.number + 1 != len(known):
            raise self._rewound(durable, self._first_gap(known))
        if not self._allow_missing and part.last_epoch < durable:
            raise self._rewound(durable, part.last_epoch)
        return Chain(durable, part.number + 1, name)

    def _later_chain(self, chain: Chain, later: Sequence[int], foreign: tuple[str, ...]) -> Chain:
        """Of the files that a writer before this one has added without its being known."""
        end, number, last = chain.end, chain.number, chain.name
        torn: tuple[str, ...] = ()
        for at, first in enumerate(later):
            name = _name(first)
            part = self._part(name)
            if part is None:
                # None of these epochs is known to be durable, so whoever leads has their rows.
                torn = tuple(map(_name, later[at:]))
                break
            self._check_author(name, part)
            if part.incarnation != self.whose.incarnation:
                raise self._from_after(name)
            self._check_term(part)
            if first != end + 1 and not self._allow_missing:
                raise self._rewound(part.last_epoch, end)
            end, number, last = part.last_epoch, part.number + 1, name
        return Chain(end, number, last, torn, foreign)

    def _part(self, name: str) -> Part | None:
        """What a file says of itself; None if it is not whole."""
        footer = self._disk.footer(self._in(name))
        try:
            found = pq.read_metadata(pa.BufferReader(b"PAR1" + footer)).metadata or {}
        except (pa.ArrowException, OSError):  # of the bytes: they have been read
            return None
        start = PREFIX.encode()
        said = {k[len(start) :].decode(): v for k, v in found.items() if k.startswith(start)}
        try:
            part = msgspec.convert({k: v.decode() for k, v in said.items()}, Part, strict=False)
        except (msgspec.ValidationError, UnicodeDecodeError) as error:
            raise FlowError(
                f"sink {self.whose.sink!r}: {self._in(name)} is none of Holdfast's, or of an "
                f"earlier version ({error})",
                hint="move it elsewhere, or give the flow a folder of its own",
            ) from error
        if _name(part.first_epoch) != name or part.last_epoch < part.first_epoch:
            raise FlowError(
                f"sink {self.whose.sink!r}: {self._in(name)} has the epochs {part.first_epoch} to "
                f"{part.last_epoch}: it was renamed",
                hint="give it its old name again, or move it elsewhere",
            )
        return part

    def _check_author(self, name: str, part: Part) -> None:
        if (part.flow, part.sink) != (self.whose.flow, self.whose.sink):
            raise FlowError(
                f"sink {self.whose.sink!r}: {self._in(name)} has rows of sink {part.sink!r} of "
                f"flow {part.flow!r}, and this is flow {self.whose.flow!r}",
                hint="give each flow a folder of its own; one that goes on keeps its name",
            )

    def _first_gap(self, known: Sequence[int]) -> int:
        """The last epoch before the first file that is missing."""
        end = -1
        for first in known:
            part = self._part(_name(first)) if first == end + 1 else None
            if part is None:
                break
            end = part.last_epoch
        return end

    def _check_chain(self) -> None:
        """Whether the file is still there that the next one follows on."""
        last = self.chain.name
        if last is None or self._allow_missing or self._disk.exists(self._in(last)):
            return
        self._examine(Beginning.TAKE_OVER, self.chain.end)  # says what is missing

    def _set_aside(self, torn: Sequence[str]) -> None:
        """Have readers not see files that cannot be read, and will be written again."""
        for name in torn:
            log.warning(
                "sink %r: %s is torn, or follows on a file that is; its epochs are written again",
                self.whose.sink,
                self._in(name),
            )
            self._disk.rename(self._in(name), self._fresh(""))

    # --- the staging folder ---------------------------------------------------------------------

    def _in(self, *names: str) -> str:
        return "/".join((self._path, *names))

    def _fresh(self, suffix: str) -> str:
        """A name in the staging folder that nobody has used."""
        return f"{self._staging}/{uuid.uuid4().hex}{suffix}"

    def _stage(self, table: pa.Table, part: Part) -> str:
        """A file in the staging folder, synced."""
        self._tidy()
        staged = self._fresh(".parquet")
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
            self._disk.link(staged, self._in(name))

    def _tidy(self) -> None:
        """Remove staged files; one that is published has another name. What cannot be removed now
        is tried again later."""
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
        """Raise the reason why a file or folder that a call needs is not there."""
        staging = self._staging.rpartition("/")[2]
        try:
            names, marks = self._disk.list(self._in(HIDDEN)), self._marks()
        except FileNotFoundError:
            names, marks = [], []
        if marks and not self._is_among(marks):
            raise self._taken(marks[-1][1]) from error
        if marks and (match := _WRITER.fullmatch(staging)):
            self._check_latest(int(match[1]), names)
        if staging in names:
            raise error  # a file in it is missing; the next attempt makes another
        try:
            self._examine(Beginning.TAKE_OVER, self.chain.end)
        except FileNotFoundError:
            raise self._rewound(self.chain.end, -1) from error
        raise StagingGone from error

    # --- errors ---------------------------------------------------------------------------------

    def _taken(self, by: FlowMark) -> FlowError:
        return FlowError(
            f"sink {self.whose.sink!r}: another flow, {by.flow!r} ({by.incarnation}), has taken "
            f"the folder {self._path} over from flow {self.whose.flow!r} "
            f"({self.whose.incarnation})",
            hint="give each run a directory of its own, and resume a flow once",
        )

    def _from_after(self, name: str) -> FlowError:
        return FlowError(
            f"sink {self.whose.sink!r}: {self._in(name)} is from after the flow was stopped",
            hint="another flow has gone on from there; give this one a directory of its own",
        )

    def _rewound(self, committed: int, found: int) -> SinkRewoundError:
        return SinkRewoundError(
            self.whose.sink,
            committed,
            found,
            f"files were removed from {self._path}, or it was restored from an older backup, or is "
            f"not the same folder on all machines: put the files with the epochs {found + 1} to "
            f"{committed} back and resume the flow. If they are meant to be missing (moved "
            "elsewhere, or a new folder), say parquet(..., allow_missing=True)",
        )


def _name(first: int) -> str:
    return f"part-{first:012d}.parquet"
