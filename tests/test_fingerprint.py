"""What a plan is described by, and where two plans differ."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.engine.batches import empty
from holdfast.plan.fingerprint import describe, differences, fingerprint, from_stored, stored
from holdfast.plan.planner import plan
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.sources import rows
from tests.support.operator_cases import Changes
from tests.support.plan_flows import SCHEMA, calls, doubled


def differ(one: Flow, other: Flow) -> list[str]:
    return differences(describe(plan(one)), describe(plan(other)))


def test_flows_that_are_written_alike_have_one_fingerprint() -> None:
    assert fingerprint(plan(calls())) == fingerprint(plan(calls()))
    assert differ(calls(), calls()) == []
    others = [calls(key="ts"), calls(time=60), calls(least=2.0), calls(kind=pa.int32())]
    assert len({fingerprint(plan(flow)) for flow in [calls(), *others]}) == 5


def test_the_fingerprint_is_the_same_whatever_the_hash_seed() -> None:
    code = (
        "from holdfast.plan.fingerprint import fingerprint; "
        "from holdfast.plan.planner import plan; "
        "from tests.support.plan_flows import calls, doubled; "
        "print(fingerprint(plan(calls())), fingerprint(plan(doubled(1))))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{fingerprint(plan(calls()))} {fingerprint(plan(doubled(1)))}\n"}


def test_what_differs_is_named_by_stage_and_aspect() -> None:
    (changed, _) = differ(calls(key="ts"), calls())
    assert changed == (
        "stage 'time window by (ts)': name is time window by (ts), not time window by (k); "
        "key is ts, not k; schema is (v: double, ts: int64), not (k: int64, v: double, ts: int64)"
    )
    (changed,) = differ(calls(time=60), calls())
    assert changed.startswith(
        "stage 'time window by (k)': operator is time window(on='ts', time=60,"
    )
    assert "time=300" in changed
    by_schema = differ(calls(kind=pa.int32()), calls())
    assert (
        "stage 'events': schema is (k: int64, v: int32, ts: int64) by ts, not (k: int64, "
        in (by_schema[0])
    )


def test_stages_that_came_or_went_are_named() -> None:
    more = calls()
    more.source("others", rows(empty(SCHEMA))).sink("more", discard())
    assert differ(more, calls())[:2] == ["stage 'others' is new", "stage 'more' is new"]
    assert differ(calls(), more)[:2] == ["stage 'others' is missing", "stage 'more' is missing"]


def test_stages_in_another_order_are_another_plan() -> None:
    there = describe(plan(calls()))
    (text,) = differences(there[::-1], there)
    assert text.startswith("the stages are in the order 'out', 'time window by (k)', 'events', not")


def test_newer_code_is_another_fingerprint_but_fits_the_same_state() -> None:
    assert fingerprint(plan(doubled(0))) != fingerprint(plan(doubled(1)))
    assert differ(doubled(0), doubled(1)) == []
    assert differ(calls(least=2.0), calls()) == []


def test_protection_is_no_part_of_it() -> None:
    protected = calls()
    protected.protection = pairs()
    assert fingerprint(plan(protected)) == fingerprint(plan(calls()))


def test_a_manifest_keeps_descriptions_also_of_a_later_version() -> None:
    described = describe(plan(calls()))
    assert from_stored(stored(described)) == described
    later = [{**values, "colour": "red"} for values in stored(described)]
    assert from_stored(later) == described
    earlier = [{n: v for n, v in values.items() if n != "code"} for values in stored(described)]
    assert from_stored(earlier) == tuple(replace(d, code="") for d in described)


def test_every_operator_is_described() -> None:
    flow = Flow("all")
    named = SCHEMA.append(pa.field("name", pa.string()))
    keyed = flow.source("events", rows(empty(named)), event_time="ts").key_by("k")
    start, end = col("v") > 1.0, col("v") < 0.0
    kept = {"v": col("v"), "first": F.at_start("v")}
    streams = [
        keyed.agg(t=F.mean("v")),
        keyed.window(rows=3).agg(t=F.max("v")),
        keyed.window(time=10, lateness=2).agg(n=F.count()),
        keyed.spans(start=start, end=end, emit=kept),
        keyed.spans(start=start, end=end, emit=kept, timeout=30),
        keyed.join(keyed, within=5),
        keyed.apply(Changes()),
    ]
    for number, stream in enumerate(streams):
        stream.sink(f"out {number}", discard())
    described = [d.operator for d in describe(plan(flow)) if d.kind == "keyed"]
    spans = "start=(col('v') > lit(1.0)), end=(col('v') < lit(0.0)), "
    emit = "emit={v: col('v'), first: at_start('v')}"
    assert described == [
        "running aggregate(t=mean(col('v')): double)",
        "row window(rows=3, every=1, t=max(col('v')): double)",
        "time window(on='ts', time=10, every=10, hold=2, n=count(): int64)",
        f"spans({spans}{emit})",
        f"spans({spans}{emit}, on='ts', wait=30)",
        "window join(on=['ts', 'ts'], within=5, hold=0)",
        "Changes(state={last: string, seen: int64, top: double})",
    ]
