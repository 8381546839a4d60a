"""The state of one key during a call of user code.

A `KeyState` holds the encoded values and timers of a key. User code accesses it through a `Handle`
and the state variables that the handle returns, which have the methods of PySpark's own. Changes
affect only the `KeyState`; the operator writes it to its table once the whole call has succeeded.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pyspark.sql import types as T
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from holdfast.errors import FlowError
from holdfast.spark.schemas import RowCodec, struct_of

NO_TIMER = (1 << 63) - 1
"""Due time of a key without timers: later than any watermark but the last."""


@dataclass(frozen=True)
class Variable:
    """A state variable as declared by the processor."""

    name: str
    kind: str
    """value, list or map"""
    schema: T.StructType
    keys: T.StructType | None = None


class KeyState:
    """One key's state: the bytes of each variable, or None, and the timers in ascending order."""

    __slots__ = ("_lists", "_maps", "_stored", "key", "timers")

    def __init__(self, key: Any, stored: list[bytes | None], timers: bytes | None) -> None:
        self.key = key
        self._stored = stored
        self._lists: dict[int, list[bytes]] = {}
        self._maps: dict[int, dict[bytes, bytes]] = {}
        self.timers: list[int] = msgspec.msgpack.decode(timers) if timers else []

    def value(self, at: int) -> bytes | None:
        return self._stored[at]

    def put(self, at: int, value: bytes | None) -> None:
        self._stored[at] = value

    def items(self, at: int) -> list[bytes]:
        """Return the mutable items of a list variable."""
        if at not in self._lists:
            stored = self._stored[at]
            self._lists[at] = [] if stored is None else msgspec.msgpack.decode(stored)
        return self._lists[at]

    def entries(self, at: int) -> dict[bytes, bytes]:
        """Return the mutable entries of a map variable."""
        if at not in self._maps:
            stored = self._stored[at]
            self._maps[at] = {} if stored is None else dict(msgspec.msgpack.decode(stored))
        return self._maps[at]

    def stored(self) -> list[bytes | None]:
        """Return all variables encoded for the table; an empty one is None."""
        for at, items in self._lists.items():
            self._stored[at] = msgspec.msgpack.encode(items) if items else None
        for at, entries in self._maps.items():
            self._stored[at] = msgspec.msgpack.encode(list(entries.items())) if entries else None
        return self._stored

    def stored_timers(self) -> bytes | None:
        return msgspec.msgpack.encode(self.timers) if self.timers else None


class Handle(StatefulProcessorHandle):
    """Replaces Spark's own handle of a processor. `key_state` is that of the current key."""

    def __init__(self, timed: bool, where: str) -> None:
        self.variables: list[Variable] = []
        self.key_state: KeyState | None = None
        self._timed, self._where = timed, where
        self._open = True

    def seal(self) -> None:
        """Refuse new state variables: the processor's `init` has returned."""
        self._open = False

    # --- state variables --------------------------------------------------------------------------

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: Any = None) -> Any:
        at, variable = self._declare(stateName, "value", schema, None, ttlDurationMs)
        return ValueHandle(self, at, variable)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: Any = None) -> Any:
        at, variable = self._declare(stateName, "list", schema, None, ttlDurationMs)
        return ListHandle(self, at, variable)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: Any = None
    ) -> Any:
        at, variable = self._declare(stateName, "map", valueSchema, userKeySchema, ttlDurationMs)
        return MapHandle(self, at, variable)

    def deleteIfExists(self, stateName: str) -> None:
        """Do nothing: a flow starts without the state of another one."""

    def _declare(
        self, name: str, kind: str, schema: Any, keys: Any, ttl: Any
    ) -> tuple[int, Variable]:
        here = f"{self._where}, state {name!r}"
        if not self._open:
            raise FlowError(f"{here}: state variables can be declared in init() only")
        if ttl is not None:
            raise FlowError(
                f"{here}: a time to live is not supported: Spark measures it in processing time, "
                "on which no result may depend",
                hint="register an event-time timer that clears the state",
            )
        if any(v.name == name for v in self.variables):
            raise FlowError(f"{here}: another state variable has the same name")
        of_keys = None if keys is None else struct_of(keys, here)
        self.variables.append(Variable(name, kind, struct_of(schema, here), of_keys))
        return len(self.variables) - 1, self.variables[-1]

    def current(self) -> KeyState:
        if self.key_state is None:
            raise RuntimeError("state is accessible only while a key's rows or timers are handled")
        return self.key_state

    # --- timers -----------------------------------------------------------------------------------

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._require_time()
        key_state = self.current()
        if not abs(expiryTimestampMs) < NO_TIMER:
            raise ValueError(f"{expiryTimestampMs} is not a time in milliseconds")
        if expiryTimestampMs not in key_state.timers:
            insort(key_state.timers, int(expiryTimestampMs))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._require_time()
        if expiryTimestampMs in self.current().timers:
            self.current().timers.remove(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        self._require_time()
        return iter(list(self.current().timers))

    def _require_time(self) -> None:
        if not self._timed:
            raise ValueError("timers need time_mode='EventTime'")


class ValueHandle:
    """PySpark's `ValueState` of the current key."""

    def __init__(self, handle: Handle, at: int, variable: Variable) -> None:
        self._handle, self._at = handle, at
        self._codec = RowCodec(variable.schema, f"state {variable.name!r}")

    def exists(self) -> bool:
        return self._handle.current().value(self._at) is not None

    def get(self) -> tuple[Any, ...] | None:
        stored = self._handle.current().value(self._at)
        return None if stored is None else self._codec.decode(stored)

    def update(self, newValue: tuple[Any, ...]) -> None:
        self._handle.current().put(self._at, self._codec.encode(newValue))

    def clear(self) -> None:
        self._handle.current().put(self._at, None)


class ListHandle:
    """PySpark's `ListState` of the current key."""

    def __init__(self, handle: Handle, at: int, variable: Variable) -> None:
        self._handle, self._at = handle, at
        self._codec = RowCodec(variable.schema, f"state {variable.name!r}")

    @property
    def _items(self) -> list[bytes]:
        return self._handle.current().items(self._at)

    def exists(self) -> bool:
        return bool(self._items)

    def get(self) -> Iterator[tuple[Any, ...]]:
        return (self._codec.decode(item) for item in list(self._items))

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        self._items[:] = [self._codec.encode(v) for v in newState]

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        self._items.append(self._codec.encode(newState))

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        self._items.extend([self._codec.encode(v) for v in newState])

    def clear(self) -> None:
        self._items.clear()


class MapHandle:
    """PySpark's `MapState` of the current key, with its entries in insertion order."""

    def __init__(self, handle: Handle, at: int, variable: Variable) -> None:
        self._handle, self._at = handle, at
        where = f"state {variable.name!r}"
        assert variable.keys is not None
        self._keys, self._values = RowCodec(variable.keys, where), RowCodec(variable.schema, where)

    @property
    def _entries(self) -> dict[bytes, bytes]:
        return self._handle.current().entries(self._at)

    def exists(self) -> bool:
        return bool(self._entries)

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        stored = self._entries.get(self._keys.encode(key))
        return None if stored is None else self._values.decode(stored)

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        return self._keys.encode(key) in self._entries

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self._entries[self._keys.encode(key)] = self._values.encode(value)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return (
            (self._keys.decode(k), self._values.decode(v)) for k, v in list(self._entries.items())
        )

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return (self._keys.decode(k) for k in list(self._entries))

    def values(self) -> Iterator[tuple[Any, ...]]:
        return (self._values.decode(v) for v in list(self._entries.values()))

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self._entries.pop(self._keys.encode(key), None)

    def clear(self) -> None:
        self._entries.clear()
