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
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.connectors.parquet_flows import FLOW, HIDDEN, FlowRegister
from holdfast.connectors.parquet_parts import (
    EMPTY,
    Beginning,
    Chain,
    Overtaken,
    ParquetPart,
    PublishedParts,
    part_name,
)
from holdfast.connectors.sinks import Authority
from holdfast.errors import FlowError, require
from holdfast.storage.disk import Disk

log = logging.getLogger("holdfast.parquet")

SUCCESS = "_SUCCESS"
_WRITER = re.compile(r"writer-(\d{6})-(\d{20})-([0-9a-f]{32})")


class StagingGone(Exception):
    """This writer's staging folder was removed, but no rows were and no other writer leads. The
    writer can claim again."""


class PartFolder:
    """One writer's access to a folder."""

    def __init__(self, path: str, authority: Authority, *, allow_missing: bool, disk: Disk) -> None:
        self._path, self.authority, self._disk = path, authority, disk
        self._parts = PublishedParts(path, authority, allow_missing=allow_missing, disk=disk)
        self._flows = FlowRegister(path, authority, disk)
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
        self.chain = self._parts.examine(beginning, durable)
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
            self._parts.check_end(self.chain)
            self._disk.link(staged, self._join(part_name(first)))
        except FileExistsError:
            return self.look_again()
        except FileNotFoundError as error:
            self._explain(error)
        self._disk.sync_folder(self._path)
        self.chain = Chain(last, number + 1, part_name(first), foreign=self.chain.foreign)
        self._tidy()
        return last

    def look_again(self) -> int:
        """Return the last published epoch, after a call whose outcome is unknown."""
        try:
            self.chain = self._parts.examine(Beginning.TAKE_OVER, self.chain.end)
            self._move_torn(self.chain.torn)
            self._disk.sync_folder(self._path)
        except FileNotFoundError as error:
            self._explain(error)
        return self.chain.end

    def close(self, schema: pa.Schema) -> None:
        """Write ``_SUCCESS`` at the end of the flow, and an empty file if there are no rows."""
        authority = self.authority
        try:
            if self.chain.name is None and self._parts.is_empty():
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
            marks = self._flows.marks()
            ours = bool(marks) and self._flows.is_ours(marks[-1][1])
            if not ours and marks and (self._marked or self._flows.is_registered(marks)):
                raise self._flows.taken_over(marks[-1][1])
            if not ours or beginning is not Beginning.TAKE_OVER:
                # Check first: a claim that is about to fail must not fence a running flow.
                self._parts.examine(beginning, durable)
            number = marks[-1][0] + (not ours) if marks else 0
            if ours or self._flows.link(number):
                self._marked = True
                return number

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
        if any((match := FLOW.fullmatch(n)) and int(match[1]) > flow for n in names):
            raise self._flows.taken_over(self._flows.marks()[-1][1])
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
            names, marks = self._disk.list(self._join(HIDDEN)), self._flows.marks()
        except FileNotFoundError:
            names, marks = [], []
        if marks and not self._flows.is_registered(marks):
            raise self._flows.taken_over(marks[-1][1]) from error
        if marks and (match := _WRITER.fullmatch(staging)):
            self._check_latest(int(match[1]), names)
        if staging in names:
            raise error  # only the staged file is missing; the next attempt writes another
        try:
            self._parts.examine(Beginning.TAKE_OVER, self.chain.end)
        except FileNotFoundError:
            raise self._parts.rewound(self.chain.end, -1) from error
        raise StagingGone from error
