"""The connections of pushers to a site: their messages become calls of the push readers."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.net.bundles import rows_of
from holdfast.net.connection import Connection
from holdfast.site.push import PushReader
from holdfast.site.staging import GIVEN_UP, Reply, Staged


class PushReaders:
    """The pushers' connections to one site. Turns their messages into calls of the readers."""

    def __init__(
        self,
        readers: Callable[[], dict[int, PushReader]],
        leader: Callable[[int], tuple[str, int] | None],
    ) -> None:
        self._readers, self._leader = readers, leader
        self._opened: dict[Connection, tuple[PushReader, Staged]] = {}

    def forget(self, connection: Connection) -> None:
        """Drop what a lost connection had not completed; another attempt sends it again."""
        reader, staged = self._opened.pop(connection, (None, None))
        if reader is not None and staged is not None:
            reader.forget(staged)

    def on_push_begin(self, connection: Connection, message: wire.PushBegin) -> None:
        reader = self._leading(connection, message.source)
        if reader is not None:
            reader.begin(message.query, message.batch, message.push, _reply(connection))

    def on_push_open(self, connection: Connection, message: wire.PushOpen) -> None:
        reader = self._leading(connection, message.source)
        if reader is None:
            return
        self.forget(connection)
        reply = _reply(connection)
        staged = reader.open(message.push, message.partition, message.attempt, reply)
        if staged is not None:
            self._opened[connection] = reader, staged

    def on_push_rows(
        self, connection: Connection, message: wire.PushRows, body: memoryview
    ) -> None:
        opened = self._opened_by(connection)
        if opened is not None:
            reader, staged = opened
            reader.rows(staged, rows_of(body), _reply(connection))

    def on_push_done(self, connection: Connection, message: wire.PushDone) -> None:
        opened = self._opened_by(connection)
        if opened is not None:
            reader, staged = opened
            reader.done(staged, _reply(connection))

    def on_push_commit(self, connection: Connection, message: wire.PushCommit) -> None:
        reader = self._leading(connection, message.source)
        if reader is not None:
            reader.commit(message.push, message.partitions, _reply(connection))

    def on_push_end(self, connection: Connection, message: wire.PushEnd) -> None:
        reader = self._leading(connection, message.source)
        if reader is not None:
            reader.end(message.query, _reply(connection))

    def _leading(self, connection: Connection, source: int) -> PushReader | None:
        """The reader of a source, if this site leads it; if not, the pusher is told who does."""
        reader = self._readers().get(source)
        if reader is None or not reader.leads:
            connection.send(wire.PushTaken(False, wire.NOT_HERE, self._leader(source)))
            return None
        return reader

    def _opened_by(self, connection: Connection) -> tuple[PushReader, Staged] | None:
        """The partition that a task has opened; None if another site leads the source by now."""
        opened = self._opened.get(connection)
        if opened is None:
            raise ProtocolError("rows of a partition that was not opened")
        reader, _ = opened
        if self._readers().get(reader.source) is not reader or not reader.leads:
            connection.send(wire.PushTaken(False, GIVEN_UP))
            return None
        return opened


def _reply(connection: Connection) -> Reply:
    def reply(ok: bool, reason: str) -> None:
        connection.send(wire.PushTaken(ok, reason))

    return reply
