"""Running out of memory: what the limit is, and how to tell such an error from a bad row.

A process that runs out of memory says nothing about the row that it happened at: another row would
have done the same a moment later, and with it every other replica, which holds the same state. So
such an error is neither searched for a row nor answered by a dead letter, and no replica is failed
for it: the flow stops and says what needed the memory, and how much there was.
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
    """What bounds the memory of this process, in bytes: the machine's memory, the process's own
    limit (which spark.executor.pyspark.memory sets), and the container's."""
    found = {"of the machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found["of the process (RLIMIT_AS)"] = soft
    for path in _CGROUP:
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            found[f"of its control group ({path})"] = int(text)
    return found


def limit_bytes() -> int:
    """The smallest of all limits."""
    return min(limits().values())


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, means that there is no more memory.
    (Those of numpy and Arrow are `MemoryError`s.)"""
    while error is not None:
        if isinstance(error, MemoryError | OutOfMemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        error = error.__cause__
    return False


def out_of_memory(where: str, held: str, cause: BaseException) -> OutOfMemoryError:
    """The error that stops a flow: `where` it happened, and what is `held` there."""
    name, nbytes = min(limits().items(), key=lambda item: item[1])
    said = f"{type(cause).__name__}: {cause}".rstrip(": ")
    return OutOfMemoryError(
        f"{where}: out of memory ({said}). {held}; the process has {_used()}, and the limit {name} "
        f"is {_mb(nbytes)}",
        hint="give the sites more memory or spread the state over more sites; bound the state with "
        "windows or time-outs; let less be in flight with Options(budget=Budget(...)). Every "
        "replica of a partition has the same state, so none was failed for this",
    )


@contextmanager
def naming(where: Callable[[], str], held: Callable[[], str]) -> Iterator[None]:
    """Have what runs out of memory in here say where that is, and what is held."""
    try:
        yield
    except OutOfMemoryError:
        raise  # it has been said
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(where(), held(), error) from error


def state_size(keys: int, nbytes: int) -> str:
    """How large the state of a stage is, in words."""
    return f"The state of the stage here is {keys:,} keys in {_mb(nbytes)}"


def _used() -> str:
    """What counts towards RLIMIT_AS, and what counts towards the other limits."""
    resident = f"{_mb(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)} resident"
    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resident
    return f"{_mb(mapped)} mapped and {resident}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MB"
