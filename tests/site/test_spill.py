"""What is kept for others goes to disk past its bound."""

import os
import signal

import numpy as np
import pyarrow as pa
import pytest

from holdfast import FlowError
from holdfast.api.options import Options
from holdfast.core.exchange import Kept
from holdfast.core.ids import Epoch
from holdfast.engine.batches import Track
from holdfast.net.bundles import Frames
from holdfast.protections import upstream
from holdfast.site.spill import Spill
from tests.support.runs import pids, replicas, until, until_protected, until_rows
from tests.support.windows import check, paced, windows


def frames(first: int) -> Frames:
    """10,000 bytes of numbers, and some text."""
    numbers = np.arange(first, first + 1_250)
    batch = pa.record_batch({"n": numbers, "s": [f"row {n:05}" for n in numbers]})
    return Frames(batch, Track.merged([]), None)


def by_age(kept: list[Frames]) -> list[Kept]:
    return [Kept(Epoch(n), True, f) for n, f in enumerate(kept)]


def test_the_oldest_go_first_and_are_what_they_were(tmp_path) -> None:
    kept = [frames(n) for n in range(10)]
    before = [f.batch for f in kept]
    size = kept[0].nbytes
    spill = Spill(str(tmp_path), 4 * size)
    spill.make_room(by_age(kept))
    assert [f.spilled for f in kept] == [True] * 6 + [False] * 4
    assert [f.batch for f in kept] == before and {f.nbytes for f in kept} == {size}
    assert (spill.kept_bytes, spill.spilled_bytes) == (10 * size, 6 * size)
    assert not os.listdir(tmp_path), "a file without a name is gone with the process"
    spill.make_room(by_age(kept[3:]))
    assert spill.spilled_bytes == 3 * size and spill.error is None


def test_what_cannot_be_written_stays_in_memory(tmp_path) -> None:
    kept = [frames(n) for n in range(4)]
    before = [f.batch for f in kept]
    spill = Spill(str(tmp_path / "missing"), 0)
    spill.make_room(by_age(kept))
    assert not any(f.spilled for f in kept) and "missing" in str(spill.error)
    assert [f.batch for f in kept] == before
    (tmp_path / "missing").mkdir()
    spill.make_room(by_age(kept))
    assert all(f.spilled for f in kept) and spill.error is None


def test_a_task_is_rebuilt_from_disk(kept, tmp_path) -> None:
    options = Options(partitions=8, log_bytes_max=0, spill=str(tmp_path))
    run = windows(paced(tmp_path), upstream(failure_domain="process")).start(
        sites=4, options=options
    )
    kept.append(run)
    assert run.options.partitions == 8
    until_protected(run, 4)
    until_rows(run, 30_000)
    until(lambda: any(s["spilled_bytes"] for s in run.status()["sites"]), "some of it is on disk")
    os.kill(pids(run)[replicas(run)["totals", 0][0]], signal.SIGKILL)
    until(lambda: run.status()["dead"], "the death is known")
    check(run, kept, tmp_path)


def test_a_bound_below_nothing_is_refused() -> None:
    with pytest.raises(FlowError, match="log_bytes_max must not be negative"):
        Options(log_bytes_max=-1)
