"""The published files of a parquet sink, and whether a writer can continue from them.

A file's metadata records which writer wrote it, and its epochs. So a listing and a few footers show
which files are missing, torn, or written by another flow.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.connectors.sinks import Authority
from holdfast.errors import FlowError, SinkError, SinkRewoundError
from holdfast.storage.disk import Disk

EMPTY = "part-empty.parquet"
"""The file of a result without rows, so that readers find a schema. It has no epochs."""
PREFIX = "holdfast."
PART = re.compile(r"part-(\d{12})\.parquet")


def part_name(first: int) -> str:
    """Return the name of the file that begins with this epoch."""
    return f"part-{first:012d}.parquet"


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


class PublishedParts:
    """One writer's look at the published files of a folder."""

    def __init__(self, path: str, authority: Authority, *, allow_missing: bool, disk: Disk) -> None:
        self._path, self._authority, self._allow_missing = path, authority, allow_missing
        self._disk = disk

    def _join(self, name: str) -> str:
        return f"{self._path}/{name}"

    def names(self) -> list[str]:
        return self._disk.list(self._path)

    def is_empty(self) -> bool:
        return not any(map(PART.fullmatch, self.names()))

    def examine(self, beginning: Beginning, durable: int) -> Chain:
        """Return the published files. Raise if this writer cannot continue from them."""
        names = self.names()
        firsts = sorted(int(m[1]) for n in names if (m := PART.fullmatch(n)))
        foreign = tuple(
            n
            for n in names
            if n.endswith(".parquet")
            and not n.startswith((".", "_"))
            and n != EMPTY
            and not PART.fullmatch(n)
        )
        if beginning is not Beginning.TAKE_OVER and firsts:
            self._check_overtaken(part_name(firsts[-1]))
        if beginning is Beginning.FIRST:
            self._expect_none([n for n in names if n in foreign or PART.fullmatch(n)])
            return Chain(-1, 0)
        known = [f for f in firsts if f <= durable]
        chain = self._known_chain(known, durable)
        later = [f for f in firsts if f > durable]
        if beginning is Beginning.AFTER_STOP and later:
            raise self._written_after_stop(part_name(later[0]))
        return self._later_chain(chain, later, foreign)

    def _check_overtaken(self, name: str) -> None:
        """Raise `Overtaken` if a later leader of the same flow has published this file."""
        with contextlib.suppress(FlowError):  # a file that this flow did not write
            part = self._part(name)
            if part is not None and part.incarnation == self._authority.incarnation:
                self._check_term(part)

    def _check_term(self, part: ParquetPart) -> None:
        if part.term > self._authority.term:
            raise Overtaken

    def _expect_none(self, names: Sequence[str]) -> None:
        if names:
            raise FlowError(
                f"sink {self._authority.sink!r}: the directory {self._path} already holds parquet "
                f"files ({names[0]})",
                hint="give each run a new directory, or empty this one first",
            )

    def _known_chain(self, known: Sequence[int], durable: int) -> Chain:
        """Return the chain of the files whose first epoch the flow knows to be durable."""
        if not known:
            if durable >= 0 and not self._allow_missing:
                raise self.rewound(durable, -1)
            return Chain(durable, 0)
        name = part_name(known[-1])
        part = self._part(name)
        if part is None:
            raise SinkError(
                f"sink {self._authority.sink!r}: {self._join(name)} cannot be read as parquet, and "
                f"the flow no longer has its rows: epochs up to {durable} were durable",
                hint="restore the file from a backup; or move it away and set allow_missing=True",
            )
        self._check_author(name, part)
        if part.last_epoch > durable:
            raise self._written_after_stop(name)
        if not self._allow_missing and part.number + 1 != len(known):
            raise self.rewound(durable, self._first_gap(known))
        if not self._allow_missing and part.last_epoch < durable:
            raise self.rewound(durable, part.last_epoch)
        return Chain(durable, part.number + 1, name)

    def _later_chain(self, chain: Chain, later: Sequence[int], foreign: tuple[str, ...]) -> Chain:
        """Extend the chain with files that an earlier writer published but did not report."""
        end, number, last = chain.end, chain.number, chain.name
        torn: tuple[str, ...] = ()
        for at, first in enumerate(later):
            name = part_name(first)
            part = self._part(name)
            if part is None:
                # None of these epochs is known to be durable, so the leader still has their rows.
                torn = tuple(map(part_name, later[at:]))
                break
            self._check_author(name, part)
            if part.incarnation != self._authority.incarnation:
                raise self._written_after_stop(name)
            self._check_term(part)
            if first != end + 1 and not self._allow_missing:
                raise self.rewound(part.last_epoch, end)
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
                f"sink {self._authority.sink!r}: {self._join(name)} was not written by this "
                f"version of Holdfast ({error})",
                hint="move the file elsewhere, or give the flow a folder of its own",
            ) from error
        if part_name(part.first_epoch) != name or part.last_epoch < part.first_epoch:
            raise FlowError(
                f"sink {self._authority.sink!r}: {self._join(name)} was renamed: it holds the "
                f"epochs {part.first_epoch} to {part.last_epoch}",
                hint="give the file its old name again, or move it elsewhere",
            )
        return part

    def _check_author(self, name: str, part: ParquetPart) -> None:
        if (part.flow, part.sink) != (self._authority.flow, self._authority.sink):
            raise FlowError(
                f"sink {self._authority.sink!r}: {self._join(name)} holds rows of sink "
                f"{part.sink!r} of flow {part.flow!r}, and this is flow {self._authority.flow!r}",
                hint="give each flow a folder of its own; a resumed flow must keep its name",
            )

    def _first_gap(self, known: Sequence[int]) -> int:
        """Return the last epoch before the first missing file."""
        end = -1
        for first in known:
            part = self._part(part_name(first)) if first == end + 1 else None
            if part is None:
                break
            end = part.last_epoch
        return end

    def check_end(self, chain: Chain) -> None:
        """Raise if the last file of the chain was removed."""
        last = chain.name
        if last is None or self._allow_missing or self._disk.exists(self._join(last)):
            return
        self.examine(Beginning.TAKE_OVER, chain.end)  # raises and names what is missing

    # --- errors ---------------------------------------------------------------------------------

    def _written_after_stop(self, name: str) -> FlowError:
        return FlowError(
            f"sink {self._authority.sink!r}: {self._join(name)} was written after the flow was "
            "stopped",
            hint="another flow has continued there; give this one a directory of its own",
        )

    def rewound(self, committed: int, found: int) -> SinkRewoundError:
        return SinkRewoundError(
            self._authority.sink,
            committed,
            found,
            f"files were removed from {self._path}, or it was restored from an older backup, or is "
            f"not the same folder on all machines: put the files with the epochs {found + 1} to "
            f"{committed} back and resume the flow. If they are missing on purpose (moved "
            "elsewhere, or a new folder), set parquet(..., allow_missing=True)",
        )
