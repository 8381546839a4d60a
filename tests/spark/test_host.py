"""Sites as real Spark tasks, fed by Spark and writing what Spark reads."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from holdfast import Flow, FlowError, HostError, SiteLostError, col
from holdfast import functions as hf
from holdfast.api.options import Options
from holdfast.control.run import start
from holdfast.lab.workloads.dmz import DmzRows, dmz_flow, oracle, write_parquet
from holdfast.sinks import discard, parquet
from holdfast.sources import generator, rows, spark_batch, spark_stream
from holdfast.spark.host import UNFIT, SparkHost


def same_rows(found, expected) -> None:
    found = found.select(*expected.columns)
    assert found.exceptAll(expected).isEmpty()
    assert expected.exceptAll(found).isEmpty()


def wait_for_figures(run, sites: int) -> None:
    deadline = time.monotonic() + 20
    while len(run.status()["sites"]) < sites and time.monotonic() < deadline:
        time.sleep(0.05)


def numbers(split: int, offset: int, n: int) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array([i % 7 for i in range(offset, offset + n)], pa.int64())})


def endless(name: str, rate: float = 20_000) -> Flow:
    flow = Flow(name)
    source = flow.source("numbers", generator(numbers, numbers(0, 0, 0).schema, rate=rate))
    source.key_by("k").agg(n=hf.count()).sink("out", discard())
    return flow


def test_sites_run_as_named_jobs_and_give_the_oracles_answer(sites_spark) -> None:
    flow = dmz_flow(DmzRows(keys=20_000, splits=2).source(rows=600_000, rate=200_000), discard())
    run = flow.start(sites_spark, sites=2)
    tracker = sites_spark.sparkContext.statusTracker()
    (group,) = {t._host._group for t in [run]}
    jobs = tracker.getJobIdsForGroup(group)
    assert len(jobs) == 2, "one job for each site"
    for job in jobs:
        (stage,) = tracker.getJobInfo(job).stageIds
        assert tracker.getStageInfo(stage).numTasks == 1
    assert run.wait(60)
    expected = oracle(600_000, keys=20_000, splits=2)
    report = run.sink_report("alerts")
    assert (report["rows"], report["digest"]) == (expected["rows"], expected["digest"])
    domains = run.status()["domains"].values()
    assert len({d.process for d in domains}) == 2
    assert {d.application for d in domains} == {sites_spark.sparkContext.applicationId}


def descriptions(spark: SparkSession) -> dict[int, str | None]:
    """What Spark's UI, and its REST API, say of each job."""
    java = spark.sparkContext._jsc.sc()
    java.listenerBus().waitUntilEmpty()
    jobs = java.statusStore().jobsList(None)
    found = [jobs.apply(i) for i in range(jobs.size())]
    return {
        j.jobId(): j.description().get() if j.description().isDefined() else None for j in found
    }


def test_all_that_spark_is_made_to_do_is_described(sites_spark, tmp_path) -> None:
    """Sites, what feeds them, and what a batch job finds out before it is run."""
    write_parquet(tmp_path / "in", 20_000, 2, keys=2_000)
    df = sites_spark.read.parquet(str(tmp_path / "in"))
    stream = sites_spark.readStream.schema(df.schema).option("maxFilesPerTrigger", 1)
    stream_df = stream.parquet(str(tmp_path / "in"))
    before = descriptions(sites_spark)
    sites_spark.sparkContext.setJobDescription("the user's own")
    batch_pushed = dmz_flow(spark_batch(df, order_by="ts"), discard(), name="one")
    assert batch_pushed.start(sites_spark, sites=2).wait(60)
    once = {"availableNow": True}
    stream_pushed = dmz_flow(spark_stream(stream_df, order_by="ts", trigger=once), discard(), "two")
    assert stream_pushed.start(sites_spark, sites=1).wait(60)
    result = batch_pushed.batch(sites_spark, {"packets": df})
    batch_pushed.stream(sites_spark, {"packets": stream_df})
    said = [text for job, text in descriptions(sites_spark).items() if job not in before]
    assert {re.sub(r"\d+", "N", str(text)) for text in said} == {
        "Holdfast flow 'one': site N",
        "Holdfast flow 'one': feed source 'packets'",
        "Holdfast flow 'one' as a batch job: survey of source 'packets'",
        "Holdfast flow 'one' as a stream: keys for the buckets",
        "Holdfast flow 'two': site N",
        "Holdfast flow 'two': feed source 'packets', micro-batch N",
    }
    planned = result._jdf.queryExecution().executedPlan().toString()
    assert "one: spans" in planned and "one: packets" in planned
    result.count()
    assert "the user's own" in descriptions(sites_spark).values()
    sites_spark.sparkContext.setLocalProperty("spark.job.description", None)


def test_a_batch_dataframe_in_and_parquet_out_equals_the_batch_job(sites_spark, tmp_path) -> None:
    write_parquet(tmp_path / "in", 120_000, 3, keys=10_000)
    df = sites_spark.read.parquet(str(tmp_path / "in"))
    source = spark_batch(df.repartition(5), order_by="ts")
    flow = dmz_flow(source, parquet(tmp_path / "out"))
    run = flow.start(sites_spark, sites=2)
    assert run.wait(60)
    assert run.status()["rows_in"] == 120_000
    found = sites_spark.read.parquet(str(tmp_path / "out"))
    same_rows(found, flow.batch(sites_spark, {"packets": df}))
    assert found.count() == oracle(120_000, keys=10_000)["rows"]


def test_a_streaming_dataframe_is_handed_over_by_its_tasks(sites_spark, tmp_path) -> None:
    write_parquet(tmp_path / "in", 100_000, 4, keys=10_000)
    schema = sites_spark.read.parquet(str(tmp_path / "in")).schema
    stream = sites_spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    df = stream.parquet(str(tmp_path / "in")).where(F.col("src") >= 0)
    source = spark_stream(df, order_by="ts", trigger={"availableNow": True})
    flow = dmz_flow(source, parquet(tmp_path / "out"))
    run = flow.start(sites_spark, sites=2)
    assert run.wait(60)
    found = sites_spark.read.parquet(str(tmp_path / "out"))
    batch_input = sites_spark.read.parquet(str(tmp_path / "in"))
    same_rows(found, flow.batch(sites_spark, {"packets": batch_input}))
    assert found.count() == oracle(100_000, keys=10_000)["rows"]


def test_two_sources_in_the_recorded_order_equal_the_batch_job(sites_spark, tmp_path) -> None:
    """A join of a Spark source and a native one: the records carry the order to the batch job."""
    n = 3_000
    left = pa.table({"k": [i % 11 for i in range(n)], "t": list(range(n)), "a": list(range(n))})
    right = pa.table({"k": [i % 11 for i in range(n)], "t": list(range(n)), "b": list(range(n))})
    spark_left = sites_spark.createDataFrame(left.to_pandas())
    flow = Flow("joined")
    one = flow.source("left", spark_batch(spark_left, order_by="t"), event_time="t")
    two = flow.source("right", rows(right), event_time="t")
    joined = one.key_by("k").join(two.key_by("k"), within=20, lateness=5)
    joined.select("k", "a", "b").sink("out", parquet(tmp_path / "out"))
    run = flow.start(sites_spark, sites=2)
    assert run.wait(60)
    inputs = {"left": spark_left, "right": sites_spark.createDataFrame(right.to_pandas())}
    records = [
        {
            "epoch": r.epoch,
            "base": r.base,
            "ranges": [[x.source, x.split, x.start, x.end] for x in r.ranges],
            "idle": list(r.idle),
            "ended": r.ended,
        }
        for r in run.records()
    ]
    found = sites_spark.read.parquet(str(tmp_path / "out"))
    assert found.count() > n
    same_rows(found, flow.batch(sites_spark, inputs, records=records))


def test_a_killed_task_stops_an_unprotected_flow_with_the_partitions_named(sites_spark) -> None:
    run = endless("doomed").start(sites_spark, sites=2, partitions=8)
    wait_for_figures(run, 2)
    victim = next(s["pid"] for s in run.status()["sites"] if s["site"] == 1)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(SiteLostError, match=r"site 1 died.*'running aggregate by \(k\)': 0-3"):
        run.wait(30)
    # Spark is unharmed, and so is the next flow on it.
    again = endless("after").start(sites_spark, sites=2)
    time.sleep(0.5)
    again.stop()
    assert again.sink_report("out")["rows"] > 0


def test_a_site_that_dies_in_spark_before_the_start_is_resubmitted(sites_spark) -> None:
    class Clumsy(SparkHost):
        """Site 0 comes late. Meanwhile site 1, and what is launched in its place, is killed."""

        def launch(self, flow, config, on_exit) -> None:
            if config.site == 0:
                # Site 0 is held back, so that the flow cannot start meanwhile.
                threading.Timer(8, super().launch, (flow, config, on_exit)).start()
            else:
                super().launch(flow, config, on_exit)

    flow = endless("patient")
    from holdfast.plan.planner import plan

    host = Clumsy(sites_spark, plan(flow), 2)
    started: list = []
    thread = threading.Thread(
        target=lambda: started.append(start(flow, options=Options(sites=2), host=host))
    )
    from holdfast.control import run as run_module

    runs: list = []
    original = run_module.Run._begin
    run_module.Run._begin = lambda self, t: (runs.append(self), original(self, t))[1]
    try:
        thread.start()
        killed = set()
        deadline = time.monotonic() + 30
        while len(killed) < 2 and time.monotonic() < deadline:
            controller = runs[0]._controller if runs else None
            for domain in list(controller.roster.domains.values()) if controller else []:
                pid = int(domain.process.split("/")[1])
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            time.sleep(0.02)
        thread.join(40)
    finally:
        run_module.Run._begin = original
    (run,) = started
    time.sleep(0.5)
    run.stop()
    assert set(run.status()["dead"]) == {1, 2}
    assert run.sink_report("out")["rows"] > 0


def test_too_few_slots_are_refused_with_the_numbers(sites_spark) -> None:
    with pytest.raises(HostError, match=r"needs 50 task slots \(50 sites, 0 .*and Spark has 6"):
        endless("big").start(sites_spark, sites=50)
    df = sites_spark.range(5)
    flow = Flow("pushed")
    flow.source("ids", spark_batch(df)).sink("out", discard())
    with pytest.raises(HostError, match=r"needs 7 task slots \(6 sites, 1 push sources"):
        flow.start(sites_spark, sites=6)


def test_connect_is_refused_by_name() -> None:
    class Fake:
        """Stands for a Connect session, which has no JVM behind it."""

    Fake.__module__, Fake.__name__ = "pyspark.sql.connect.session", "SparkSession"
    with pytest.raises(HostError, match="Spark Connect cannot host sites"):
        endless("connect").start(Fake(), sites=2)


def test_unfit_settings_are_refused_with_what_to_change(sites_spark, monkeypatch) -> None:
    conf = sites_spark.sparkContext.getConf()
    for key in UNFIT:
        changed = conf.__class__(False).setAll(conf.getAll()).set(key, "true")
        monkeypatch.setattr(type(sites_spark.sparkContext), "getConf", lambda self, c=changed: c)
        with pytest.raises(HostError, match=f"set {key}=false"):
            endless("unfit").start(sites_spark, sites=2)


def test_the_wrong_kind_of_dataframe_is_refused(sites_spark) -> None:
    df = sites_spark.range(5)
    with pytest.raises(FlowError, match="not a stream"):
        spark_stream(df)
    with pytest.raises(FlowError, match="no column 'when'"):
        spark_batch(df, order_by="when")
    with pytest.raises(FlowError, match="wrap a DataFrame"):
        Flow("raw").source("ids", df)


def test_an_error_of_the_feeding_query_stops_the_flow(sites_spark) -> None:
    boom = F.udf(lambda i: 1 // (i - 3), "long")
    df = sites_spark.range(10).select(boom("id").alias("x"))
    flow = Flow("broken-feed")
    flow.source("ids", spark_batch(df)).key_by("x").agg(s=hf.sum("x")).sink("out", discard())
    run = flow.start(sites_spark, sites=1)
    with pytest.raises(FlowError, match=r"feeding source 'ids'[\s\S]*ZeroDivisionError"):
        run.wait(30)


def test_a_batch_dataframe_with_empty_partitions(sites_spark, tmp_path) -> None:
    df = sites_spark.range(0, 1_000, 1, 8).where("id < 100 or id > 900").toDF("k")
    flow = Flow("gaps")
    flow.source("ids", spark_batch(df)).filter(col("k") >= 0).sink("out", parquet(tmp_path / "out"))
    run = flow.start(sites_spark, sites=1)
    assert run.wait(30)
    found = sites_spark.read.parquet(str(tmp_path / "out"))
    assert found.count() == 199
    ordered = [r["k"] for r in found.collect()]
    assert ordered == sorted(ordered), "a batch DataFrame is read in order"


def test_the_flow_file_runs_from_the_command_line(tmp_path: Path) -> None:
    import json
    import subprocess
    import sys

    file = tmp_path / "totals.py"
    file.write_text(
        "import pyarrow as pa\n"
        "from holdfast import Flow, functions as F, sinks, sources\n"
        "def make(split, offset, n):\n"
        "    keys = [i % 3 for i in range(offset, offset + n)]\n"
        "    return pa.record_batch({'k': pa.array(keys, 'int64')})\n"
        "flow = Flow('totals')\n"
        "source = flow.source('n', sources.generator(make, make(0, 0, 0).schema, rows=5000))\n"
        "source.key_by('k').agg(n=F.count()).sink('out', sinks.discard())\n"
    )
    status = tmp_path / "status.json"
    command = [sys.executable, "-m", "holdfast.ui.cli", "run", str(file), "--sites", "2", "--quiet"]
    done = subprocess.run(
        [*command, "--json", str(status)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(status.read_text())["rows_in"] == 5_000
    missing = subprocess.run([*command[:4], "nowhere.py"], capture_output=True, text=True)
    assert missing.returncode == 2 and "the file nowhere.py does not exist" in missing.stderr


@pytest.fixture(scope="module")
def sites_spark(spark: SparkSession) -> SparkSession:
    return spark
