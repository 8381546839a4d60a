"""The output gap of Structured Streaming when its driver is killed."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from holdfast.errors import HostError
from holdfast.lab.bench.kills import (
    kill_all,
    until,
)
from holdfast.lab.workloads import dmz


def rival_gaps(work: Path, count: int, console: Console) -> list[float]:
    """Return the output gap of the rival, in ms, for each kill of its driver."""
    folder = Path(tempfile.mkdtemp(dir=work))
    files = 40 * (count + 1)
    dmz.write_parquet(folder / "input", files * 100_000, files)
    gaps: list[float] = []
    rival = _start_rival(folder)
    try:
        for _ in range(count):
            _until_written(folder, len(_outputs(folder)) + 5, rival)
            time.sleep(random.uniform(0.0, 1.0))
            killed = rival
            kill_all(killed.pid)
            rival = _start_rival(folder)
            killed.wait()
            before = _outputs(folder)  # the new process takes seconds to start
            _until_written(folder, len(before) + 1, rival)
            gaps.append((_outputs(folder)[len(before)] - before[-1]) * 1e3)
            console.print(f"  gap {gaps[-1]:,.0f} ms")
    finally:
        kill_all(rival.pid)
        rival.wait()
    return gaps


def _start_rival(folder: Path) -> subprocess.Popen[bytes]:
    code = "import sys; from holdfast.lab.bench.rivals import serve; serve(*sys.argv[1:])"
    paths = [str(folder / name) for name in ("input", "checkpoint", "output")]
    with open(folder / "rival.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code, *paths],
            start_new_session=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _until_written(folder: Path, batches: int, rival: subprocess.Popen[bytes]) -> None:
    def written() -> bool:
        if rival.poll() is not None:
            log = (folder / "rival.log").read_text()[-2_000:]
            raise HostError(f"the rival ended with status {rival.returncode}: {log}")
        return len(_outputs(folder)) >= batches

    until(written, f"the rival has written {batches} batches")


def _outputs(folder: Path) -> list[float]:
    """Return when each batch's output was written, in order. A batch is in the output once it has
    an entry in the output's metadata log."""
    log = folder / "output" / "_spark_metadata"
    return sorted(f.stat().st_mtime for f in log.glob("[0-9]*"))
