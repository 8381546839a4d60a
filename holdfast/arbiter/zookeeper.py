"""An arbiter in ZooKeeper, for applications on several hosts.

The znode `/holdfast/<flow>/entry` holds the entry; its version is the entry's version. The
ephemeral znode `leader` next to it lives as long as the leader's session. The session replaces the
lease: a thread of kazoo keeps it alive, and it ends when the process is paused or disconnected for
longer than the session timeout. The server bounds this timeout, by default to at least 4 s.

`lead` creates the leader znode and the new term in one transaction, and `commit` succeeds only
while neither has changed. A leader znode therefore always belongs to the term in the entry. None
of our code runs in kazoo's threads.

`holdfast.arbiter.zookeeper_access` says how the client authenticates and who else may change the
znodes. Znodes of which others may, although this client is to be alone, are refused.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

from holdfast.arbiter import Arbiter, following, pack, unpack
from holdfast.arbiter.zookeeper_access import ZooKeeperAccess
from holdfast.core.ids import Entry
from holdfast.errors import ArbiterAway, HostError
from holdfast.log_limit import RepeatsFilter

try:
    from kazoo import exceptions as kazoo_errors
    from kazoo.client import KazooClient, TransactionRequest
except ImportError as error:
    raise HostError(
        "an arbiter in ZooKeeper requires the package kazoo, which is not installed",
        hint="pip install 'holdfast[zookeeper]'",
    ) from error

ANSWER_S_MAX = 0.8
"""Maximum time to wait for a connection and an answer, in seconds."""

ROOT = "/holdfast"
LOG = logging.getLogger("holdfast.arbiter")
LOG.addHandler(logging.NullHandler())  # callers get ArbiterAway when the connection is lost
LOG.addFilter(RepeatsFilter())  # kazoo logs every attempt to connect to a server that is away


class ZooKeeperArbiter(Arbiter):
    """An arbiter at ``host:port,host:port``. The session starts in the background."""

    def __init__(
        self, hosts: str, flow: str, lease_s: float, access: ZooKeeperAccess | None = None
    ) -> None:
        super().__init__(flow, lease_s)
        self.hosts = hosts
        self._access = access or ZooKeeperAccess()
        self._acls = self._access.acls()
        self._checked = False
        """Whether the permissions of an entry that was there are known to be right."""
        root = self._root = f"{ROOT}/{quote(flow, safe='')}"
        self._entry, self._leader = f"{root}/entry", f"{root}/leader"
        self._client = KazooClient(
            hosts,
            timeout=lease_s,
            connection_retry={"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5},
            logger=LOG,
            **self._access.client_settings(),
        )
        self._session_s: float | None = None
        self._refused = False
        """Whether the server refused the credentials. The client does not connect again."""
        self._watch_connections()
        self._client.start_async()

    @property
    def lease_s(self) -> float:
        """The server may grant another time-out than was asked for, by default at least 4 s."""
        return self._session_s or self._lease_s

    def _watch_connections(self) -> None:
        """kazoo keeps the time-out that was granted to itself. It also takes a server that goes
        away during SASL for one that refuses the password, and would never connect again."""
        connection = self._client._connection
        connect = connection._connect

        def watched(*args: Any) -> Any:
            try:
                read_ms, connect_ms = connect(*args)
            except kazoo_errors.AuthFailedError as error:
                if isinstance(error.__cause__, kazoo_errors.ConnectionDropped):
                    raise error.__cause__ from None
                self._refused = True
                raise
            self._session_s = read_ms * 1.5 / 1e3
            return read_ms, connect_ms

        connection._connect = watched

    def read(self) -> Entry:
        def sync_and_get() -> Any:
            self._client.sync_async(self._entry)  # this server may lag behind the others
            return self._client.get_async(self._entry)

        try:
            data, stat = self._ask(sync_and_get)
        except kazoo_errors.NoNodeError:
            return Entry()
        self._check_acls()
        if not data:
            return Entry()
        header, value = unpack(data)
        return Entry(stat.version, header["term"], header["holder"], value)

    def commit(self, expected: Entry, value: bytes) -> Entry:
        wanted = following(expected, value)

        def change(transaction: TransactionRequest) -> None:
            transaction.check(self._leader, 0)
            transaction.set_data(self._entry, _encode(wanted), expected.version)

        if expected.term == self._term != 0 and self._transact(change):
            return wanted
        entry = self.read()
        if entry == wanted and self._leads(expected.term):
            return wanted  # a retry: the first call took effect
        raise self._superseded(expected, entry)

    def lead(self, holder: str, despite: Entry | None = None) -> Entry | None:
        owner = self._owner()
        last = self.read()
        deposed = owner is not None and despite is not None and despite.term == last.term
        if owner is not None and not deposed:
            # This session may lead already: an earlier `lead` succeeded and its answer was lost.
            if owner != self._session() or last.holder != holder:
                return None
            self._term = last.term
            return last
        if last.version == 0:
            self._create_entry()
        entry = Entry(last.version + 1, last.term + 1, holder, last.value)

        def change(transaction: TransactionRequest) -> None:
            if deposed:
                transaction.delete(self._leader)
            transaction.create(self._leader, holder.encode(), self._acls, ephemeral=True)
            transaction.set_data(self._entry, _encode(entry), last.version)

        if not self._transact(change):
            return None
        self._term = entry.term
        return entry

    def renew(self, entry: Entry) -> bool:
        return self._leads(entry.term)

    def resign(self, entry: Entry) -> None:
        if entry.term != self._term:
            return
        last = self.read()

        def change(transaction: TransactionRequest) -> None:
            transaction.check(self._entry, last.version)  # never delete the znode of a successor
            transaction.delete(self._leader)

        if last.term == self._term != 0:
            self._transact(change)
        self._term = 0

    def names(self) -> list[str]:
        try:
            found = self._ask(partial(self._client.get_children_async, ROOT))
        except kazoo_errors.NoNodeError:
            return []
        return [unquote(name) for name in found]

    def remove(self, entry: Entry) -> bool:
        if self.read() != entry or self._owner() is not None:
            return False

        def change(transaction: TransactionRequest) -> None:
            transaction.delete(self._entry, entry.version)
            transaction.delete(self._root)  # fails if somebody leads: there is another znode

        return self._transact(change)

    def close(self) -> None:
        """End the session, and with it any leadership; wait for at most `ANSWER_S_MAX`."""

        def stop() -> None:
            with contextlib.suppress(Exception):  # kazoo raises a bare Exception on a timeout
                self._client.stop()
                self._client.close()

        stopper = threading.Thread(target=stop, daemon=True, name="holdfast-arbiter-close")
        stopper.start()
        stopper.join(ANSWER_S_MAX)

    def _create_entry(self) -> None:
        """Create the entry, and the znodes above it. Another client may do so at the same time."""
        for path, acls in (
            (ROOT, self._access.root_acls()),
            (self._root, self._acls),
            (self._entry, self._acls),
        ):
            with contextlib.suppress(kazoo_errors.NodeExistsError):
                self._ask(partial(self._client.create_async, path, b"", acls))
        self._check_acls()

    def _check_acls(self) -> None:
        """Refuse znodes that were made with other permissions. Not only those of the entry count:
        who may delete children of the znode above it can put another entry in its place."""
        if self._checked:
            return
        for path in (self._root, self._entry):
            found, _ = self._ask(partial(self._client.get_acls_async, path))
            if not self._access.fits(found):
                shown = ", ".join(f"{a.id.scheme}:{a.id.id}" for a in found)
                raise self._not_permitted(f"{path} is open to {shown}")
        self._checked = True

    def _not_permitted(self, cause: str) -> HostError:
        return HostError(
            f"the arbiter at zk://{self.hosts}: {cause}",
            hint="use the credentials that the entry was made with, or delete it: "
            f"deleteall {self._root} in zkCli.sh",
        )

    def _leads(self, term: int) -> bool:
        return term == self._term != 0 and self._owner() == self._session()

    def _session(self) -> int:
        identity = self._client.client_id
        return identity[0] if identity else -1

    def _owner(self) -> int | None:
        """Return the id of the session that leads, or None."""

        def sync_and_look() -> Any:
            self._client.sync_async(self._leader)
            return self._client.exists_async(self._leader)

        stat = self._ask(sync_and_look)
        return stat.ephemeralOwner if stat else None

    def _transact(self, change: Callable[[TransactionRequest], None]) -> bool:
        """Apply a change atomically; return whether it was applied."""

        def send() -> Any:
            transaction = self._client.transaction()
            change(transaction)
            return transaction.commit_async()

        failures = [r for r in self._ask(send) if isinstance(r, Exception)]
        for failure in failures:
            if isinstance(failure, kazoo_errors.NoAuthError):
                raise self._not_permitted(f"this client may not change {self._root}")
            if not isinstance(failure, REFUSALS):
                raise self._away(failure)
        return not failures

    def _ask(self, send: Callable[[], Any]) -> Any:
        """Return the answer to the request of `send`, or raise `ArbiterAway`.

        A request that fails because the session expired is sent again in the next session. This is
        safe for all requests here: the leader znode vanished with the session, and versions are
        never reused.
        """
        deadline = time.monotonic() + ANSWER_S_MAX
        while True:
            while not self._client.connected:
                if self._refused:
                    raise self._not_permitted("it does not accept the credentials")
                if time.monotonic() > deadline:
                    raise self._away("no connection")
                time.sleep(0.005)
            try:
                return send().get(timeout=max(0.0, deadline - time.monotonic()))
            except (kazoo_errors.NoNodeError, kazoo_errors.NodeExistsError):
                raise
            except kazoo_errors.NoAuthError as error:
                raise self._not_permitted(f"this client may not use {self._root}") from error
            except kazoo_errors.AuthFailedError as error:
                raise self._not_permitted("it does not accept the credentials") from error
            except kazoo_errors.SessionExpiredError as error:
                if time.monotonic() > deadline:
                    raise self._away(error) from error
            except (kazoo_errors.KazooException, self._client.handler.timeout_exception) as error:
                raise self._away(error) from error

    def _away(self, cause: Exception | str) -> ArbiterAway:
        text = cause if isinstance(cause, str) else str(cause) or type(cause).__name__
        return ArbiterAway(where=f"zk://{self.hosts}", cause=text)


REFUSALS = (
    kazoo_errors.NodeExistsError,
    kazoo_errors.NoNodeError,
    kazoo_errors.BadVersionError,
    kazoo_errors.RolledBackError,
    kazoo_errors.RuntimeInconsistency,
)


def _encode(entry: Entry) -> bytes:
    return pack(entry.value, term=entry.term, holder=entry.holder)
