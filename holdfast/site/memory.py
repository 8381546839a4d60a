"""How much memory this process may use, and what of it may be rows on their way."""

from __future__ import annotations

import os
import resource
from dataclasses import replace

from holdfast.core.sequencer import Budget

_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNLIMITED = 1 << 60


def limit_bytes() -> int:
    """The smallest of: the process's own limit (which spark.executor.pyspark.memory sets), the
    container's, and the machine's memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    for path in _CGROUP:
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            limits.append(int(text))
    return min(limits)


def fitting(budget: Budget, limit: int) -> Budget:
    """`budget`, or a smaller one where a sixteenth of the memory is less: rows in flight are held
    by several stages at once, and the state needs the rest."""
    return replace(budget, bytes_in_flight_max=min(budget.bytes_in_flight_max, limit // 16))
