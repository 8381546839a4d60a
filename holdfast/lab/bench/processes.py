"""Memory and processor time of a tree of processes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(root: int | None = None) -> list[int]:
    """Return the process `root` (by default this one) and all its descendants."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            parents.setdefault(int(fields[1]), []).append(int(name))
    pids = [os.getpid() if root is None else root]
    for pid in pids:  # the list grows during the iteration
        pids += parents.get(pid, [])
    return pids


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command, which may itself contain blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process has ended
        return []


def rss_mb(root: int | None = None) -> float:
    """Return the current resident memory of the tree in MiB. Pages shared by forked processes count
    in each of them."""
    pages = [int(fields[21]) for pid in tree(root) if (fields := _stat(pid))]
    return sum(pages) * _PAGE / (1 << 20)


def cpu_s(root: int | None = None) -> float:
    """Return the processor time of the tree so far in seconds, without ended processes."""
    ticks = [int(fields[11]) + int(fields[12]) for pid in tree(root) if (fields := _stat(pid))]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


class PeakRss:
    """Samples the memory of a process tree in a thread, for the duration of a ``with`` block.

    >>> with PeakRss() as memory:
    ...     data = bytes(1 << 20)
    >>> memory.peak_mb > 1
    True
    """

    def __init__(self, root: int | None = None, every_s: float = 0.5) -> None:
        self.peak_mb = 0.0
        self._root = os.getpid() if root is None else root
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-rss", daemon=True)

    def _sample(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, rss_mb(self._root))
            if self._ended.wait(self._every_s):
                return

    def __enter__(self) -> PeakRss:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak_mb = max(self.peak_mb, rss_mb(self._root))
