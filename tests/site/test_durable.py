"""A flow is stored while it runs, and goes on after everything was killed as if nothing were."""

import os
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, FlowError
from holdfast import functions as F
from holdfast.api.options import Checkpoint
from holdfast.api.protection import Protection
from holdfast.connectors.sources import generator
from holdfast.control import checkpoint_coordinator
from holdfast.control.run import Run
from holdfast.protections import pairs, passive
from holdfast.sinks import discard, outlet, parquet
from holdfast.sources import follow
from holdfast.storage.restore_point import RestorePoint
from tests.support.runs import PATIENCE_S, kill, replicas, until, until_protected, until_rows
from tests.support.stored_flow import (
    RATE,
    ROWS,
    SCHEMA,
    Driver,
    drivers,
    kill_again_and_again,
    made,
    mixed,
    results,
    size,
    undisturbed,
)
from tests.support.tiers import nightly
from tests.support.windows import events

__all__ = ["drivers", "undisturbed"]


@pytest.mark.parametrize("protect", [nightly("None"), "pairs(failure_domain='process')"])
def test_driver_and_sites_are_killed_again_and_again(
    protect: str, undisturbed: dict[str, pa.Table], drivers: list[Driver], tmp_path: Path
) -> None:
    kill_again_and_again(str(tmp_path / "store"), protect, undisturbed, drivers, tmp_path)


# --- in one process: one that is stopped without draining is as good as lost ---------------------


def until_stored(run: Run, more: int = 1) -> None:
    """Some more checkpoints are complete."""
    for _ in range(more):
        before = run.status()["checkpoint"]["epoch"]

        def stored(before: int | None = before) -> bool:
            assert not run.ended(0), run.error
            return run.status()["checkpoint"]["epoch"] not in (None, before)

        until(stored, "a checkpoint is complete")


def until_taken(run: Run, rows: int) -> None:
    until(lambda: run.status()["rows_in"] >= rows, f"{rows} rows are taken")


def start(kept: list[Run], flow: Flow, **more: object) -> Run:
    kept.append(flow.start(**({"sites": 2, "partitions": 6} | more)))
    return kept[-1]


def lose(run: Run) -> None:
    run.stop(drain=False)


def test_it_goes_on_with_other_sites_partitions_elsewhere_and_another_protection(
    kept: list[Run], undisturbed: dict[str, pa.Table], tmp_path: Path
) -> None:
    out, store = tmp_path / "out", str(tmp_path / "store")
    flow = mixed(made(RATE // 4), out, pairs(failure_domain="process"))
    first = start(kept, flow, sites=3, checkpoint=Checkpoint(store, interval=0.1))
    until_protected(first, 3)
    until_stored(first, 2)
    # It is the leader of some tasks, and perhaps of a checkpoint that is under way.
    for victim in ("running aggregate by (k)", "near"):
        kill(first, replicas(first)[victim, 0][0])
        until_stored(first, 2)
        until_protected(first, 3)
    lose(first)
    restore_point = RestorePoint.load(store)
    assert restore_point.lost and 0 < restore_point.rows < ROWS

    flow = mixed(made(RATE // 4), out, passive(interval=0.05, failure_domain="process"))
    second = start(kept, flow, restore_from=store)
    assert second.options.store == store and second.options.store_every_ms == 100
    until_stored(second, 4)
    lose(second)

    third = start(kept, mixed(made(RATE), out), sites=1, restore_from=store)
    until_stored(third)
    total = sum(row["n"] for row in third.table("latest").to_arrow().to_pylist())
    assert total > RestorePoint.load(store).rows - 1, "the table has what was before"
    third.stop(timeout=PATIENCE_S)
    restore_point = RestorePoint.load(store)
    assert not restore_point.lost, "it was stopped"
    files = sorted(str(f.relative_to(store)) for f in Path(store).rglob("*.arrow"))
    assert files == sorted(
        {"generations/000002.arrow", "manifests/000002.arrow", *restore_point.files}
    )
    # What it begins with is elsewhere until there is a checkpoint.
    other = Checkpoint(str(tmp_path / "other"), interval=60)
    fourth = start(kept, mixed(made(RATE), out), restore_from=store, checkpoint=other)
    until_taken(fourth, restore_point.rows + 1_000)
    lose(fourth)
    fifth = start(kept, mixed(made(None), out), restore_from=str(tmp_path / "other"))
    assert fifth.records()[0].epoch == restore_point.epochs
    assert fifth.wait(PATIENCE_S)
    found = results(out)
    for name, wanted in undisturbed.items():
        assert found[name].equals(wanted), name


def test_it_is_lost_before_its_first_checkpoint_and_while_it_goes_on(
    kept: list[Run], undisturbed: dict[str, pa.Table], tmp_path: Path
) -> None:
    """And its old driver is not dead at all, but finds out that another goes on."""
    out, store = tmp_path / "out", str(tmp_path / "store")
    first = start(kept, mixed(made(RATE), out), checkpoint=Checkpoint(store, interval=60))
    until(lambda: size(out / "running"), "rows come out")
    second = start(
        kept, mixed(made(RATE), out), restore_from=store, checkpoint=Checkpoint(store, interval=0.2)
    )
    with pytest.raises(FlowError, match="another process owns the store"):
        first.wait(PATIENCE_S)
    assert second.wait(PATIENCE_S)
    assert second.records()[0].epoch == 0, "what was known came again"
    found = results(out)
    for name, wanted in undisturbed.items():
        assert found[name].equals(wanted), name
    again = start(kept, mixed(made(None), out), restore_from=store)
    assert again.wait(PATIENCE_S), "it had ended, and does so again"
    assert results(out)["running"].num_rows == ROWS


def test_of_two_that_resume_at_once_one_goes_on(
    kept: list[Run], undisturbed: dict[str, pa.Table], tmp_path: Path
) -> None:
    out, store = tmp_path / "out", str(tmp_path / "store")
    first = start(kept, mixed(made(RATE), out), checkpoint=Checkpoint(store, interval=0.2))
    until_stored(first)
    lose(first)
    together = threading.Barrier(2)
    ended: list[Exception | None] = []

    def resume() -> None:
        together.wait()
        try:
            start(kept, mixed(made(None), out), sites=1, restore_from=store).wait(PATIENCE_S)
            ended.append(None)
        except FlowError as error:
            ended.append(error)

    both = [threading.Thread(target=resume) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    refused = [error for error in ended if error is not None]
    assert len(ended) == 2 and len(refused) == 1
    # One that is overtaken while it starts may find that the other has removed what it reads.
    assert any(said in str(refused[0]) for said in ("another process owns", "is missing"))
    found = results(out)
    for name, wanted in undisturbed.items():
        assert found[name].equals(wanted), name


def test_what_goes_wrong_with_the_folder(
    kept: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    monkeypatch.setattr(checkpoint_coordinator, "RETRY_S", (0.01, 0.1))
    run = start(
        kept, mixed(made(RATE), tmp_path / "out"), checkpoint=Checkpoint(str(store), interval=0.1)
    )
    until_stored(run)
    (store / "checkpoints").rename(store / "away")
    (store / "checkpoints").touch()  # no folder can be made there
    until(lambda: run.status()["checkpoint"]["failure"], "it is noticed")
    until_rows(run)
    (store / "checkpoints").unlink()
    (store / "away").rename(store / "checkpoints")
    until_stored(run, 2)
    assert run.status()["checkpoint"]["failure"] is None
    (store / "records").rename(store / "away")
    (store / "records").touch()
    with pytest.raises(FlowError, match="cannot be written to"):
        run.wait(PATIENCE_S)
    (store / "records").unlink()
    (store / "away").rename(store / "records")
    lose(start(kept, mixed(made(RATE), tmp_path / "out"), restore_from=str(store)))


def test_what_cannot_be_gone_on_from_is_refused(kept: list[Run], tmp_path: Path) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    with pytest.raises(FlowError, match=r"checkpoint='.*' is not a Checkpoint"):
        mixed(made(None), out).start(checkpoint=str(store))  # type: ignore[arg-type]
    read = Flow("read")
    read.source("events", made(None)).sink("out", outlet())
    with pytest.raises(FlowError, match="the outlet 'out' is in memory alone"):
        read.start(checkpoint=Checkpoint(str(store), interval=0.1))
    arrival = Flow("arrival")
    keyed = arrival.source("events", made(None)).key_by("k", merge="arrival")
    keyed.agg(n=F.count()).sink("out", discard())
    with pytest.raises(FlowError, match="takes rows as they arrive"):
        arrival.start(checkpoint=Checkpoint(str(store), interval=0.1))

    run = start(kept, mixed(made(RATE), out), checkpoint=Checkpoint(str(store), interval=0.1))
    until_stored(run, 2)
    lose(run)

    def go_on(match: str, flow: Flow | None = None, **more: object) -> None:
        with pytest.raises(FlowError, match=match):
            start(kept, flow or mixed(made(RATE), out), restore_from=str(store), **more)

    go_on("can only be stored there again", checkpoint=Checkpoint(str(tmp_path / "elsewhere")))
    go_on("4 partitions a stage, not 6", partitions=4)
    other = mixed(made(None), out)
    other.name = "other"
    go_on("the other is called 'mixed'", other)
    records = sorted((store / "records").iterdir())
    if len(records) > 2:
        data = records[1].read_bytes()
        records[1].unlink()
        go_on(r"some records of epochs after \d+ are missing")
        records[1].write_bytes(data)
    delta = next(f for f in store.rglob("*-windows.arrow"))
    delta.rename(tmp_path / "moved")
    go_on(f"{delta.name} is missing")
    delta.write_bytes(b"nothing of ours")
    go_on("is damaged, or not a file that Holdfast has written")
    (tmp_path / "moved").rename(delta)
    (manifest,) = (store / "manifests").iterdir()
    data = manifest.read_bytes()
    manifest.write_bytes(data[:200])
    go_on("manifests/000000.arrow at .* is damaged")
    manifest.write_bytes(data)
    lose(start(kept, mixed(made(RATE), out), restore_from=str(store)))


def split(number: int, first: int, n: int) -> pa.RecordBatch:
    """Keys that are in one split alone."""
    rows = events(number, first, n)
    keys = pa.array(rows["k"].to_numpy() * 3 + number)
    return rows.set_column(0, "k", keys)


def test_several_splits_go_on_each_from_its_own_offset(kept: list[Run], tmp_path: Path) -> None:
    def flow(rate: int | None, out: str) -> Flow:
        flow = Flow("splits", protect=pairs(failure_domain="process"))
        source = generator(split, SCHEMA, rows=60_000, rate=rate, splits=3)
        totals = flow.source("events", source).key_by("k").agg(t=F.sum("v"), n=F.count())
        totals.sink("out", parquet(tmp_path / out, interval=0.1))
        totals.sink("count", discard())
        return flow

    store = str(tmp_path / "store")
    run = start(kept, flow(RATE, "out"), sites=3, checkpoint=Checkpoint(store, interval=0.1))
    until_stored(run, 3)
    lose(run)
    run = start(kept, flow(None, "out"), restore_from=store)
    assert run.wait(PATIENCE_S)
    assert run.sink_report("count")["rows"] == 60_000, "those before it are counted"
    with flow(None, "alone").start(sites=2, partitions=6) as alone:
        assert alone.wait(PATIENCE_S)
    found, wanted = (
        pq.read_table(tmp_path / name).sort_by([("k", "ascending"), ("n", "ascending")])
        for name in ("out", "alone")
    )
    assert found.equals(wanted) and found.num_rows == 60_000
    assert run.sink_report("count")["digest"] == alone.sink_report("count")["digest"]


def test_rows_that_come_once_are_stored_before_anything_comes_of_them(
    kept: list[Run], tmp_path: Path
) -> None:
    """Files come in an order that nobody could tell afterwards."""
    folder, out, store = tmp_path / "in", tmp_path / "out", str(tmp_path / "store")
    folder.mkdir()

    def add(number: int, age: int) -> None:
        rows = pa.Table.from_batches([events(0, number * 500, 500)])
        pq.write_table(rows, folder / ".new")
        os.utime(folder / ".new", ns=(1, age))
        (folder / ".new").rename(folder / f"{number:03d}.parquet")

    def flow(protect: Protection | None = None) -> Flow:
        flow = Flow("files", protect=protect)
        source = follow(folder, SCHEMA, until="_END", interval=0.02)
        totals = flow.source("events", source).key_by("k").agg(t=F.sum("v"), n=F.count())
        totals.sink("out", parquet(out, with_order=True, interval=0.1))
        return flow

    more: list[int] = []

    def another_is_stored(before: int | None) -> bool:
        """A checkpoint is complete when an epoch follows, so rows must come."""
        more.append(200 + len(more))
        add(more[-1], 10**7)
        time.sleep(0.05)
        return run.status()["checkpoint"]["epoch"] not in (None, before)

    run = start(
        kept, flow(pairs(failure_domain="process")), checkpoint=Checkpoint(store, interval=0.1)
    )
    for number in range(60):
        add(number, 10**9 - number)  # later ones look older
        if number in (20, 40):
            before = run.status()["checkpoint"]["epoch"]
            until(partial(another_is_stored, before), "a checkpoint is complete")
            until_taken(run, 500 * number)
            add(60 + number, 10**8)
            lose(run)
            run = start(kept, flow(), restore_from=store)
    (folder / "_END").touch()
    assert run.wait(PATIENCE_S)
    found = pq.read_table(out).sort_by("__o0")
    assert found["__o0"].to_pylist() == list(range(31_000 + 500 * len(more)))
    sums: dict[int, tuple[float, int]] = {}
    for k, t, n in zip(*(found[name].to_pylist() for name in ("k", "t", "n")), strict=True):
        assert n == sums.get(k, (0.0, 0))[1] + 1 and t >= sums.get(k, (0.0, 0))[0]
        sums[k] = (t, n)
    every = [events(0, n * 500, 500) for n in [*range(60), 80, 100, *more]]
    total = sum(float(sum(b["v"].to_pylist())) for b in every)
    assert sum(t for t, _ in sums.values()) == total, "each row once"


def many(split: int, first: int, n: int) -> pa.RecordBatch:
    """Of each key there are few rows, and far between."""
    at = np.arange(first, first + n)
    return pa.record_batch({"k": at * 7919 % 30_000, "v": at % 997 * 1.0, "ts": at // 2})


def test_what_has_changed_is_added_to_what_was_stored_before(
    kept: list[Run], tmp_path: Path
) -> None:
    rows = 60_000

    def flow(rate: int | None, out: str) -> Flow:
        flow = Flow("many")
        source = generator(many, SCHEMA, rows=rows, rate=rate)
        keyed = flow.source("events", source, event_time="ts").key_by("k")
        sink = parquet(tmp_path / out / "windows", with_order=True, interval=0.1)
        keyed.window(time=4_000, every=1_000).agg(t=F.sum("v")).sink("windows", sink)
        sink = parquet(tmp_path / out / "running", with_order=True, interval=0.1)
        keyed.agg(t=F.sum("v"), n=F.count()).sink("running", sink)
        return flow

    store = str(tmp_path / "store")
    run = start(kept, flow(1_000, "out"), sites=2, checkpoint=Checkpoint(store, interval=0.05))

    def has_deltas() -> bool:
        """Keys are gone from one of the deltas, and another is on top of it."""
        assert not run.ended(0), "too slow to see it"
        for deltas in RestorePoint.load(store).deltas.values():
            gone = [at for at, delta in enumerate(deltas) if delta.gone]
            if gone and any(not delta.gone for delta in deltas[gone[0] + 2 :]):
                return True
        return False

    until(has_deltas, "a checkpoint of several deltas")
    lose(run)
    assert start(kept, flow(None, "out"), sites=1, restore_from=store).wait(PATIENCE_S)
    assert start(kept, flow(None, "alone"), sites=1).wait(PATIENCE_S)
    for name in ("windows", "running"):
        found, wanted = (pq.read_table(tmp_path / out / name) for out in ("out", "alone"))
        order = [(n, "ascending") for n in wanted.column_names if n.startswith("__o")]
        assert found.sort_by(order).equals(wanted.sort_by(order)), name


def few_keys(split: int, offset: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"k": np.arange(offset, offset + count) % 7})


def test_files_do_not_grow_with_generations_and_checkpoints(
    kept: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the store, of temporary folders, and those in a sink's folder that are no results."""
    store, out, temporary = tmp_path / "store", tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    counts, sizes = [], []
    for generation in range(8):
        flow = Flow("long", protect=pairs(failure_domain="process"))
        source = generator(few_keys, few_keys(0, 0, 1).schema, rate=2_000)
        flow.source("rows", source).key_by("k").agg(n=F.count()).sink(
            "out", parquet(out, interval=0.05)
        )
        how = {"restore_from": str(store)} if generation else {}
        run = start(kept, flow, checkpoint=Checkpoint(str(store), interval=0.05), **how)
        until_stored(run, 4)
        lose(run)
        run.wait(PATIENCE_S)
        found = [f for folder in (store, temporary, out) for f in folder.rglob("*")]
        files = [f for f in found if f.is_file() and f.suffix != ".parquet"]
        counts.append(len(files))
        sizes.append(sum(f.stat().st_size for f in files))
    assert max(counts) <= 24, counts
    assert max(sizes) <= 64 << 10, sizes
