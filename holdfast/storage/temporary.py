"""Temporary folders that do not outlive their process for long.

The process that makes a folder holds a lock on a file in it (`flock`). The operating system
releases the lock when the process ends, however it ends. So a folder whose lock is free belongs to
no process, and the next one that makes a folder of the same kind removes it. Process numbers would
not do: containers with numbers of their own may share the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = ".holdfast-lock"


class TemporaryFolder:
    """A folder that is removed when it is closed, or when its process is gone and another one makes
    a folder of the same kind."""

    def __init__(self, kind: str, within: str | None = None) -> None:
        """`within` is the folder for it; by default that of temporary files."""
        parent, prefix = Path(within or tempfile.gettempdir()), f"holdfast-{kind}-"
        remove_stale(parent, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            lock = _locked(self.path, os.O_CREAT)
            if lock is not None:
                self.lock = lock
                """The descriptor of the lock. A process that inherits it keeps the folder, too."""
                return
            # Another process found the lock free before it was taken, and removes the folder.

    def close(self) -> None:
        """Remove the folder. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> TemporaryFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove the folders of processes that are gone. Folders without a lock, as earlier versions
    made them, stay: their processes may live."""
    for path in parent.glob(f"{prefix}*"):
        lock = _locked(path, 0)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(path: Path, flags: int) -> int | None:
    """Take the lock of a folder; None if another process has it, or it has none."""
    with contextlib.suppress(OSError):
        # Close-on-exec, as Python opens files: processes that this one starts do not hold it.
        lock = os.open(path / LOCK, os.O_RDWR | flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        return lock
    return None
