"""The parts of the world's state, each kept once, and what each step of a part leads to.

A state of the world is a tuple of small numbers: one for the controller, one for each site, one for
each link. `Parts` has the machines behind these numbers, pickled. A step of a machine is computed
once, however many states of the world it occurs in (`holdfast.lab.model.world` remembers it), so a
state of the world costs neither copying nor hashing of machines.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from holdfast.core.layout import Shape, StageShape, View
from holdfast.core.records import EpochRecord
from holdfast.errors import HoldfastError
from holdfast.lab.model.freeze import digest
from holdfast.lab.model.outputs import Output, Send, Tell


class Broken(Exception):
    """A step of a machine has failed: it raised, or an invariant of the machine does not hold."""


class Values:
    """Hashable or not, equal values have the same number."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Any) -> int:
        key = digest(value)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.all)
            self.all.append(value)
        return found


_CONSTANT = (View, Shape, StageShape, EpochRecord)


class _Shared:
    """Values that never change and that machines share: they are not pickled."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int | None:
        if type(value) not in _CONSTANT:
            return None
        found = self._numbers.get(id(value))
        if found is None:
            found = self._numbers[id(value)] = len(self.all)
            self.all.append(value)
        return found


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: _Shared) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, value: Any) -> int | None:
        return self._shared.number(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, shared: _Shared) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared

    def persistent_load(self, number: int) -> Any:
        return self._shared.all[number]


class Parts:
    """The machines of one kind. Number 0 is none."""

    def __init__(self, messages: Values) -> None:
        self._messages = messages
        self._shared = _Shared()
        self._numbers: dict[bytes, int] = {}
        self._pickled: list[bytes] = [b""]

    def __len__(self) -> int:
        return len(self._pickled) - 1

    def add(self, machine: Any) -> int:
        """The number of a machine in its present state."""
        key = digest(machine)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._pickled)
            file = io.BytesIO()
            _Pickler(file, self._shared).dump(machine)
            self._pickled.append(file.getvalue())
        return found

    def get(self, number: int) -> Any:
        """A copy of a machine."""
        return _Unpickler(self._pickled[number], self._shared).load()

    def step(self, number: int, kind: str, *what: Any) -> tuple[int, tuple[Output, ...]]:
        """The machine after a step, and what the step does to others; raises `Broken`."""
        machine = self.get(number)
        try:
            outputs = machine.step(kind, *what)
        except (HoldfastError, AssertionError, KeyError, AttributeError, IndexError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        return self.add(machine), tuple(self._numbered(output) for output in outputs)

    def _numbered(self, output: Output) -> Output:
        """An output with the number of its message instead of the message."""
        if isinstance(output, Send | Tell):
            return output._replace(message=self._messages.number(output.message))
        return output
