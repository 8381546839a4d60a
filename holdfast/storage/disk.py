"""The file system calls of a sink, on a local or shared file system.

Tests replace `Disk` by one that fails, pauses writers at any call, or loses power. Paths are
strings, and every failure is an `OSError` of the operating system.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import BinaryIO

NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_FOOTER_END = 8
"""Size of the end of a parquet file: the length of its footer in four bytes, and ``PAR1``."""


class Disk:
    """A file system. A file survives a power failure once it is synced: `sync` makes its content
    durable, and `sync_folder` of its folder makes its name durable."""

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents durably. Existing folders are synced, too: the process
        that created them may have died before it synced them."""
        parent = os.path.dirname(path)
        if parent == path:
            return
        self.make_folders(parent)
        if not self.exists(path):
            with contextlib.suppress(FileExistsError):
                self.make_folder(path)
        # A parent that is not readable is one in which no process of this user created `path`.
        with contextlib.suppress(PermissionError):
            self.sync_folder(parent)

    def make_folder(self, path: str) -> None:
        """Create one folder; its parent must exist."""
        os.mkdir(path)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except FileNotFoundError:
            return False
        return True

    def create(self, path: str) -> BinaryIO:
        """Create a file; the name must not exist."""
        return open(path, "xb")

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems sync names themselves
                raise
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Create a hard link; the name must not exist."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder, which must be empty."""
        os.rmdir(path)

    def read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY)
        with open(fd, "rb") as file:
            return file.read()

    def footer(self, path: str) -> bytes:
        """Return the end of a parquet file, from the start of its footer: its last bytes say how
        long the footer is. Return all of a file that is shorter."""
        fd = os.open(path, os.O_RDONLY)
        with open(fd, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _FOOTER_END))
            length = int.from_bytes(file.read(4), "little")
            file.seek(max(0, size - _FOOTER_END - length))
            return file.read()
