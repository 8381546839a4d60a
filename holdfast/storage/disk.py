"""Files of a local or shared file system: every call through which a sink touches one.

Tests put a disk in its place that fails, stops writers at any call, or loses power. Paths are
strings, and whatever fails is the operating system's `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import BinaryIO

NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_FOOTER_END = 8
"""A parquet file ends with the length of its footer, in four bytes, and ``PAR1``."""


class Disk:
    """What is written outlives a loss of power once it is synced: a file's content by `sync`, its
    name by `sync_folder` of the folder it is in."""

    def make_folders(self, path: str) -> None:
        """Make a folder, and those above it, durably. Those that are there are synced, too: whoever
        made them may have died before it could."""
        above = os.path.dirname(path)
        if above == path:
            return
        self.make_folders(above)
        if not self.exists(path):
            with contextlib.suppress(FileExistsError):
                self.make_folder(path)
        with contextlib.suppress(PermissionError):  # one in which nobody here can have made it
            self.sync_folder(above)

    def make_folder(self, path: str) -> None:
        """Make one folder; the one above it must be there."""
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
        """A new file; the name must not be taken."""
        return open(path, "xb")

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems sync names by themselves
                raise
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, which must not be taken."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder that must be empty."""
        os.rmdir(path)

    def read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY)
        with open(fd, "rb") as file:
            return file.read()

    def footer(self, path: str) -> bytes:
        """The end of a parquet file: as much as its last bytes say that its footer takes, or all of
        a file that is shorter."""
        fd = os.open(path, os.O_RDONLY)
        with open(fd, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _FOOTER_END))
            length = int.from_bytes(file.read(4), "little")
            file.seek(max(0, size - _FOOTER_END - length))
            return file.read()
