"""The flows that write to the folder of a parquet sink, in the order in which they began.

A flow gets its number by linking a file ``flow-N``, which succeeds only once.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Sequence

import msgspec

from holdfast.connectors.sinks import Authority
from holdfast.errors import FlowError, SinkError
from holdfast.storage.disk import NO_HARD_LINKS, Disk

HIDDEN = "_holdfast"
"""Spark, pyarrow and other readers skip names that begin with an underscore."""
FLOW = re.compile(r"flow-(\d{6})")


class FlowMark(msgspec.Struct, frozen=True):
    """The content of a ``flow-N`` file."""

    flow: str
    sink: str
    incarnation: str


class FlowRegister:
    """The ``flow-N`` files of a folder, as one writer sees them."""

    def __init__(self, path: str, authority: Authority, disk: Disk) -> None:
        self._path, self._authority, self._disk = path, authority, disk
        self._folder = f"{path}/{HIDDEN}"

    def _join(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def marks(self) -> list[tuple[int, FlowMark]]:
        """The flows that have written here, in order."""
        marks = []
        for name in self._disk.list(self._folder):
            if match := FLOW.fullmatch(name):
                data = self._disk.read(self._join(name))
                marks.append((int(match[1]), self._decode_mark(name, data)))
        return sorted(marks, key=lambda mark: mark[0])

    def _decode_mark(self, name: str, data: bytes) -> FlowMark:
        try:
            return msgspec.json.decode(data, type=FlowMark)
        except msgspec.MsgspecError as error:
            raise SinkError(
                f"sink {self._authority.sink!r}: {self._join(name)} is damaged: {error}",
                hint=f"if no flow writes to the folder, remove {self._folder}",
            ) from error

    def is_registered(self, marks: Sequence[tuple[int, FlowMark]]) -> bool:
        return any(mark.incarnation == self._authority.incarnation for _, mark in marks)

    def is_ours(self, mark: FlowMark) -> bool:
        if mark.incarnation != self._authority.incarnation:
            return False
        if mark.sink != self._authority.sink:
            raise FlowError(
                f"sink {self._authority.sink!r}: the folder {self._path} belongs to sink "
                f"{mark.sink!r} of flow {mark.flow!r}",
                hint="give each sink a folder of its own",
            )
        return True

    def link(self, number: int) -> bool:
        """Register as the last flow of the folder. Return False if another flow was faster."""
        authority = self._authority
        staged = self._join(f".{uuid.uuid4().hex}")
        with self._disk.create(staged) as file:
            mark = FlowMark(authority.flow, authority.sink, authority.incarnation)
            file.write(msgspec.json.encode(mark))
            self._disk.sync(file)
        try:
            self._disk.link(staged, self._join(f"flow-{number:06d}"))
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
        self._disk.sync_folder(self._folder)
        return True

    def taken_over(self, by: FlowMark) -> FlowError:
        return FlowError(
            f"sink {self._authority.sink!r}: another flow, {by.flow!r} ({by.incarnation}), has "
            f"taken the folder {self._path} over from flow {self._authority.flow!r} "
            f"({self._authority.incarnation})",
            hint="give each run a directory of its own, and resume a flow only once",
        )
