import contextlib

import pytest

from holdfast.control.run import Run


@pytest.fixture
def kept():
    """Runs put here are ended with the test, whatever happens."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        if not run.ended(0):
            with contextlib.suppress(Exception):
                run.stop(drain=False, timeout=20)
