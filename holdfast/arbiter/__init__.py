"""The arbiter: the one place where a flow's views and its leadership are committed.

It holds one `Entry` per flow and changes it only by compare-and-set. Whoever gets the next
version in has decided; everybody else finds out by `Superseded`. So two leaders cannot both
commit, however long one of them was stopped, and no term ever has two holders. It knows neither
what a view is nor what is done with it: the value is opaque bytes.

A call takes milliseconds, at most about two seconds, and then raises `ArbiterAway`: the caller
freezes membership and goes on. Whether the call took effect is then not known; saying it again
is safe, because `lead` and `commit` recognise what the same caller has already got in.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import FlowError, Superseded


@dataclass(frozen=True, slots=True)
class Entry:
    """What is decided. `version` counts every change, `term` every change of leader."""

    version: int = 0
    term: int = 0
    holder: str = ""
    value: bytes = b""


class Arbiter(ABC):
    """One party's access to the entry of one flow; the parties of a flow have one each."""

    def __init__(self, flow: str) -> None:
        self.flow = flow
        self._term = 0
        """The term led through this object, as far as it knows; 0 for none."""

    @abstractmethod
    def read(self) -> Entry:
        """The latest entry; ``Entry()`` if there never was one. Its holder may be dead by now."""

    @abstractmethod
    def commit(self, expected: Entry, value: bytes) -> Entry:
        """Put `value` after `expected`, for the leader; `Superseded` unless it still may."""

    @abstractmethod
    def lead(self, holder: str, despite: Entry | None = None) -> Entry | None:
        """Become the leader, in a new term, if nobody is; None if somebody else leads.

        The value stays. A leader that asks again gets the latest entry of its term. `despite` is
        the entry of a leader that is known to be dead: its lease need not run out first.
        """

    @abstractmethod
    def renew(self, entry: Entry) -> bool:
        """Extend the lease of `entry`'s term; False, for good, if that has run out."""

    @abstractmethod
    def resign(self, entry: Entry) -> None:
        """Give the lease of `entry`'s term up, so that another can lead at once."""

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Let go of connections. A leader resigns first."""

    def _superseded(self, expected: Entry, now: Entry) -> Superseded:
        if now.version == expected.version:
            cause = "it is not led from here, or its lease has run out"
        else:
            cause = (
                f"version {expected.version} is now {now.version}, in term {now.term} "
                f"of {now.holder or 'nobody'}"
            )
        return Superseded(flow=self.flow, term=expected.term, cause=cause)


def following(entry: Entry, value: bytes) -> Entry:
    """What a commit of `value` after `entry` makes."""
    return replace(entry, version=entry.version + 1, value=value)


def pack(value: bytes, **header: int | str) -> bytes:
    """A line of JSON, then the value as it is."""
    return json.dumps(header).encode() + b"\n" + value


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, value = data.partition(b"\n")
    return json.loads(header), value


_HOST = r"([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?"


def arbiter(url: str | None, flow: str, lease_s: float) -> Arbiter:
    """The arbiter at `url` for `flow`.

    None is for a flow in one application, ``file:/path`` (or the plain path) for several on one
    host, ``zk://host:port,host:port`` for several hosts.
    """
    where = f"flow {flow!r}, arbiter {url!r}"
    if flow in ("", ".", ".."):
        raise FlowError(f"{where}: a flow of this name cannot have an entry")
    if not lease_s > 0:
        raise FlowError(f"{where}: a lease of {lease_s} s is none")
    if url is None:
        from holdfast.arbiter.memory import MemoryArbiter

        return MemoryArbiter(flow, lease_s)
    if re.fullmatch(rf"zk://{_HOST}(,{_HOST})*", url):
        from holdfast.arbiter.zookeeper import ZooKeeperArbiter

        return ZooKeeperArbiter(url.removeprefix("zk://"), flow, lease_s)
    # Relative to what? Two applications would soon have two arbiters, which is worse than none.
    path = re.fullmatch(r"(?:file:(?://)?)?(/[^/].*)", url)
    if path is None:
        raise FlowError(
            f"{where}: not the address of an arbiter",
            hint="write 'file:/absolute/path' on one host, 'zk://host:port,host:port' across hosts",
        )
    from holdfast.arbiter.file import FileArbiter

    return FileArbiter(path[1], flow, lease_s)
