"""The arbiter: the one place where a flow's views and its leadership are committed.

The arbiter holds one `Entry` per flow and changes it only by compare-and-set. The first party to
write the next version wins; all others get `Superseded`. Two leaders therefore cannot both commit,
however long one of them was paused, and no term has two holders. The arbiter does not interpret
the value: it is opaque bytes.

A call takes milliseconds. After at most about two seconds it raises `ArbiterAway`: the caller
freezes membership and keeps running. It is then unknown whether the call took effect. Retrying is
safe, because `lead` and `commit` recognise an earlier write of the same caller.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from holdfast.core.ids import Entry
from holdfast.errors import FlowError, HostError, Superseded


class Arbiter(ABC):
    """One party's access to the entry of one flow. Each party has its own object."""

    def __init__(self, flow: str, lease_s: float) -> None:
        self.flow, self._lease_s = flow, lease_s
        self._term = 0
        """The term that this object last led, as far as it knows; 0 if none."""

    @property
    def lease_s(self) -> float:
        """For how long no other application can lead after a `lead` or `renew` that succeeded,
        counted from before the call."""
        return self._lease_s

    @abstractmethod
    def read(self) -> Entry:
        """Return the latest entry, or ``Entry()`` if there is none. Its holder may be dead."""

    @abstractmethod
    def commit(self, expected: Entry, value: bytes) -> Entry:
        """Write `value` as the version after `expected`; raise `Superseded` if this party does not
        lead the term of `expected`, or another version was committed."""

    @abstractmethod
    def lead(self, holder: str, despite: Entry | None = None) -> Entry | None:
        """Become the leader in a new term; return None if another party leads.

        The value does not change. A leader that calls `lead` again gets the latest entry of its
        term. `despite` is the entry of a leader known to be dead: `lead` does not wait for the
        lease of that entry to expire.
        """

    @abstractmethod
    def renew(self, entry: Entry) -> bool:
        """Extend the lease of `entry`'s term; return False, permanently, if it has expired."""

    @abstractmethod
    def resign(self, entry: Entry) -> None:
        """Give up the lease of `entry`'s term, so that another party can lead immediately."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the flows that have an entry in the same place, this one included."""

    @abstractmethod
    def remove(self, entry: Entry) -> bool:
        """Remove the entry, and return True, if it is still `entry` and nobody leads. The caller
        sees to it that nobody needs it: afterwards versions and terms begin again."""

    @property
    def removed(self) -> bool:
        """Whether the entry is away, and not only out of reach. An arbiter that then behaves as if
        there had never been one says False."""
        return False

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Close connections. A leader calls `resign` first."""

    def _superseded(self, expected: Entry, now: Entry) -> Superseded:
        if now.version == expected.version:
            cause = "this process does not lead the flow, or its lease has expired"
        else:
            cause = (
                f"version {expected.version} is now {now.version}, in term {now.term} "
                f"of {now.holder or '(no leader)'}"
            )
        return Superseded(flow=self.flow, term=expected.term, cause=cause)


def following(entry: Entry, value: bytes) -> Entry:
    """Return the entry that a commit of `value` after `entry` creates."""
    return replace(entry, version=entry.version + 1, value=value)


FORMAT = 1
"""The format of entries. Those of format 0 did not say it, and are read."""


def pack(value: bytes, **header: int | str) -> bytes:
    """Encode a header as one line of JSON, followed by the raw value."""
    return json.dumps({"format": FORMAT, **header}).encode() + b"\n" + value


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the value. Raise `HostError` if the format is a later one."""
    line, _, value = data.partition(b"\n")
    header = json.loads(line)
    if header.get("format", 0) > FORMAT:
        raise HostError(
            f"the arbiter's entry has format {header['format']}, and this Holdfast reads format "
            f"{FORMAT} at most",
            hint="install the same version of Holdfast in all applications of the flow",
        )
    return header, value


_HOST = r"([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?"


def arbiter(url: str | None, flow: str, lease_s: float) -> Arbiter:
    """Return the arbiter at `url` for `flow`.

    None suits a flow in one application, ``file:/path`` (or the plain path) several applications
    on one host, ``zk://host:port,host:port`` several hosts; behind a question mark it may say how
    to authenticate (see `holdfast.arbiter.zookeeper_access`).
    """
    where = f"flow {flow!r}, arbiter {url!r}"
    if flow in ("", ".", ".."):
        raise FlowError(f"{where}: the flow name {flow!r} is not valid", hint="use another name")
    if not lease_s > 0:
        raise FlowError(f"{where}: the lease must be positive, not {lease_s} s")
    if url is None:
        from holdfast.arbiter.memory import MemoryArbiter

        return MemoryArbiter(flow, lease_s)
    hosts, _, query = url.partition("?")
    if re.fullmatch(rf"zk://{_HOST}(,{_HOST})*", hosts):
        from holdfast.arbiter.zookeeper import ZooKeeperArbiter
        from holdfast.arbiter.zookeeper_access import ZooKeeperAccess

        access = ZooKeeperAccess.parse(query)
        return ZooKeeperArbiter(hosts.removeprefix("zk://"), flow, lease_s, access)
    # A relative path depends on the working directory: two applications would use two arbiters,
    # and both could lead.
    path = re.fullmatch(r"(?:file:(?://)?)?(/[^/].*)", url)
    if path is None:
        raise FlowError(
            f"{where}: not an arbiter URL",
            hint="use 'file:/absolute/path' on one host, 'zk://host:port,host:port' across hosts",
        )
    from holdfast.arbiter.file import FileArbiter

    return FileArbiter(path[1], flow, lease_s)
