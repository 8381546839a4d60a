"""A disk in memory that loses power: what was not synced is lost, or torn, or has survived."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from enum import Enum

import pyarrow as pa


class PowerLost(BaseException):
    """Nobody who writes files gets to handle it."""


class Survives(Enum):
    """What is left of what was not synced. A real disk may do any of these, for each file."""

    NOTHING = "neither names nor contents"
    NAMES = "names, of files that are torn"
    EVERYTHING = "all of it: only the process was killed"


class _File(io.BytesIO):
    """Contents, and what of them is on the disk."""

    def __init__(self, disk: LossyDisk) -> None:
        super().__init__()
        self._disk = disk
        self.data = b""
        self.synced: bytes | None = None

    def write(self, data: object) -> int:
        self.data += bytes(memoryview(data))
        return len(memoryview(data))

    def close(self) -> None:
        self._disk.step("close")


class LossyDisk:
    """Every operation counts; from the one numbered `until` on there is no power."""

    is_local, is_object_store = True, False

    def __init__(self, until: int | None = None) -> None:
        self.until, self.steps = until, 0
        self.done: list[str] = []
        self.names: dict[str, _File | None] = {"/": None}
        """Files by name, and folders, which are None."""
        self.synced: dict[str, _File | None] = {"/": None}

    def step(self, what: str) -> None:
        self.steps += 1
        if self.until is not None and self.steps > self.until:
            raise PowerLost
        self.done.append(what)

    def after_power_loss(self, survives: Survives) -> LossyDisk:
        """The disk as it is found afterwards."""
        found = LossyDisk()
        names = self.synced if survives is Survives.NOTHING else self.names
        for name, file in names.items():
            folder = os.path.dirname(name)
            if name != "/" and any(up not in names for up in _above(folder)):
                continue  # a name in a folder that is not there
            if file is not None:
                replica = _File(found)
                replica.data = replica.synced = self._left(file, survives)
                file = replica
            found.names[name] = found.synced[name] = file
        return found

    @staticmethod
    def _left(file: _File, survives: Survives) -> bytes:
        if survives is Survives.EVERYTHING:
            return file.data
        if survives is Survives.NAMES and file.synced != file.data:
            return file.data[: len(file.data) // 2]
        return file.synced or b""

    # --- as `holdfast.storage.files.FolderDisk` ---------------------------------------------------

    def open(self, path: str) -> _File:
        for folder in reversed(_above(os.path.dirname(path))):
            if folder not in self.names:
                self.step(f"make {folder}")
                self.names[folder] = None
                self.sync(os.path.dirname(folder))
        self.step(f"open {path}")
        file = self.names[path] = _File(self)
        return file

    def read(self, path: str) -> pa.Buffer:
        file = self.names.get(path)
        if file is None:
            raise FileNotFoundError(path)
        return pa.py_buffer(file.data)

    def sync(self, path: str) -> None:
        self.step(f"sync {path}")
        file = self.names[path]
        if file is not None:
            file.synced = file.data
            return
        inside = {n: f for n, f in self.names.items() if n != "/" and os.path.dirname(n) == path}
        for gone in [n for n in self.synced if n != "/" and os.path.dirname(n) == path]:
            if gone not in inside:
                del self.synced[gone]
        self.synced |= inside

    def move(self, path: str, to: str) -> None:
        self.step(f"move {path} to {to}")
        self.names[to] = self.names.pop(path)

    def link(self, path: str, to: str) -> None:
        self.step(f"link {path} to {to}")
        if to in self.names:
            raise FileExistsError(to)
        self.names[to] = self.names[path]

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        files = [self.names.get(path) for path in paths]
        return [len(file.data) if file is not None else None for file in files]

    def list(self, path: str) -> list[tuple[str, bool]]:
        inside = [n for n in self.names if n.startswith(f"{path}/")]
        return [(n, self.names[n] is not None) for n in inside]

    def remove(self, path: str) -> None:
        for name in [n for n in self.names if n == path or n.startswith(f"{path}/")]:
            self.step(f"remove {name}")
            del self.names[name]


def _above(folder: str) -> list[str]:
    """A folder and those that it is in, but for the root."""
    found = []
    while folder != "/":
        found.append(folder)
        folder = os.path.dirname(folder)
    return found
