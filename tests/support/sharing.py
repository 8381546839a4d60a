"""Which tests run in one process when there are several of them (pytest-xdist).

Most share nothing, and whichever process is free takes the next one. Tests that need a Spark
session or a server share it, since it takes seconds to start and is slow at first. Those that
share something come first: together they take the longest.
"""

from __future__ import annotations

from pathlib import PurePath

from xdist.scheduler.loadscope import LoadScopeScheduling

SPARK = "a Spark session", "another Spark session"
"""Two processors have work for two, and not for more."""
OF_THE_SECOND = ("test_stream_equals_batch", "test_results", "test_nexmark")
"""These take as long as all others."""
APPLICATIONS = ("test_chaos", "test_clusters")
"""These start Spark applications of their own."""
SERVERS = {"test_ends": "test_kafka"}
"""Whose servers a module needs, if not its own."""


class Sharing(LoadScopeScheduling):
    """Gives a process all tests that share something, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return shared(nodeid)


def shared(nodeid: str) -> str:
    """What a test has in common with those that run in the same process."""
    path = PurePath(nodeid.split("::")[0])
    match path.parent.name, path.stem:
        case "integration", module:
            return SERVERS.get(module, module)
        case "spark", module if module in APPLICATIONS:
            return nodeid
        case "spark", module:
            return SPARK[module in OF_THE_SECOND]
    return nodeid
