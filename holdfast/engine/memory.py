"""Out-of-memory errors: the limits of the process, and how to tell them from a bad row.

When a process runs out of memory, the current row is not the cause: another row would have failed a
moment later, and so would every other replica, which holds the same state. Such an error therefore
triggers neither a search for a bad row nor a dead letter, and no replica is failed for it. The flow
stops with an error that names the stage, its state and the limit.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.errors import OutOfMemoryError

_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNLIMITED = 1 << 60
NO_STATE = "The stage has no state"


def limits() -> dict[str, int]:
    """Return the memory limits of this process, in bytes: the machine's memory, the process limit
    (which spark.executor.pyspark.memory sets), and the limit of the control group."""
    by_name = {"of the machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        by_name["of the process (RLIMIT_AS)"] = soft
    for path in _CGROUP:
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            by_name[f"of its control group ({path})"] = int(text)
    return by_name


def limit_bytes() -> int:
    """Return the smallest limit."""
    return min(limits().values())


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether this error, or one of its causes, means that the process is out of memory.
    (The errors of numpy and Arrow are `MemoryError`s.)"""
    while error is not None:
        if isinstance(error, MemoryError | OutOfMemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        error = error.__cause__
    return False


def out_of_memory(where: str, held: str, cause: BaseException) -> OutOfMemoryError:
    """Return the error that stops a flow: `where` it happened, and the state `held` there."""
    name, nbytes = min(limits().items(), key=lambda item: item[1])
    detail = f"{type(cause).__name__}: {cause}".rstrip(": ")
    return OutOfMemoryError(
        f"{where}: out of memory ({detail}). {held}; the process uses {_used()}, and the limit "
        f"{name} is {_mb(nbytes)}",
        hint="give the sites more memory or spread the state over more sites; bound the state with "
        "windows or timeouts; reduce the rows in flight with Options(budget=Budget(...)). Every "
        "replica of a partition has the same state, so no replica was failed",
    )


@contextmanager
def naming(where: Callable[[], str], held: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error in this context into one that names the place and the state."""
    try:
        yield
    except OutOfMemoryError:
        raise  # it has the place already
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(where(), held(), error) from error


def state_size(keys: int, nbytes: int) -> str:
    """Describe the size of a stage's state."""
    return f"The stage holds {keys:,} keys in {_mb(nbytes)} of state here"


def _used() -> str:
    """Describe the mapped memory, which RLIMIT_AS limits, and the resident memory, which the
    other limits apply to."""
    resident = f"{_mb(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)} resident"
    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resident
    return f"{_mb(mapped)} mapped and {resident}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MB"
