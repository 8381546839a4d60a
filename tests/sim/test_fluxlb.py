"""The simulated machines of ``holdfast paper fluxlb``: what balancing and shared buffers gain."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from holdfast.lab.paper import fluxlb
from holdfast.lab.paper.figures import Table
from holdfast.lab.paper.fluxlb import FluxlbEffort, Made
from holdfast.lab.paper.fluxlb_sim import LOADED, RATE, SITES, SkewedCluster, SkewSetting, SkewTrace
from holdfast.ui.cli import main

SMALL = FluxlbEffort(
    buffers=(0, 512),
    rotation_s=2,
    trace_s=9,
    loaded=(1, 32),
    skew_s=4,
    collect_ms=(10, 1_000),
    memory_trace_s=12,
    pressed=(1, 20),
    memory_s=18,
    mixed_s=18,
)


def value(table: Table, approach: str, place: float) -> float:
    found = table.of(approach, "simulated")[table.places.index(place)]
    assert found is not None
    return found


def test_an_unloaded_flow_has_the_rate_of_the_thesis() -> None:
    assert SkewedCluster(SkewSetting()).run(2).rate(0) == pytest.approx(690_000, rel=0.001)


def test_no_tuple_is_lost_in_moves_nor_between_memory_and_disk() -> None:
    cluster = SkewedCluster(fluxlb.LARGE, fluxlb.holdfast(collect_ms=100)())
    drawn = 0.0
    produce = cluster._produce

    def counted() -> None:
        nonlocal drawn
        before = cluster.buffer.sum()
        produce()
        drawn += cluster.buffer.sum() - before

    cluster._produce = counted  # type: ignore[method-assign]
    for site in range(4):
        cluster.press(site, 700e6)
        cluster.speed[site] = LOADED
    trace = cluster.run(6)
    assert trace.moves
    waiting = cluster.buffer.sum() + cluster.queue.sum() + cluster.spool.sum()
    assert sum(trace.throughput) + waiting == pytest.approx(drawn, abs=1.0)
    assert np.bincount(cluster.owner, minlength=SITES).sum() == cluster.count


def test_a_shared_buffer_absorbs_a_rotating_load_and_a_divided_one_does_not() -> None:
    [table] = fluxlb.rotating_load(SMALL)
    assert value(table, "shared buffer", 0) == value(table, "divided buffer", 0) < 400
    assert value(table, "shared buffer", 512) > 1.4 * value(table, "divided buffer", 512)


def test_balancing_recovers_from_a_load_on_one_machine() -> None:
    [table] = fluxlb.one_loaded(SMALL)
    assert value(table, "static", 9) == pytest.approx(RATE * SITES * LOADED / 1e3, rel=0.05)
    assert value(table, "static", 9) < value(table, "thesis' rules", 9)
    assert value(table, "Holdfast", 9) > 0.9 * value(table, "unloaded", 9)


def test_a_load_on_all_machines_cannot_be_balanced_and_nothing_moves() -> None:
    trace = fluxlb.loaded_run(SkewSetting(), fluxlb.holdfast(), range(SITES), 6)
    assert trace.moves == [] and trace.rate(-2) == pytest.approx(RATE * SITES * LOADED, rel=0.01)


def skewed_run(made: Made) -> SkewTrace:
    return fluxlb.loaded_run(SkewSetting(weights=fluxlb.skewed(64 * SITES)), made, (), 8)


def test_the_formula_as_printed_keeps_moving_the_popular_partition() -> None:
    still = skewed_run(fluxlb.static)
    printed = skewed_run(fluxlb.thesis(collect_ms=10, as_printed=True))
    derived = skewed_run(fluxlb.thesis(collect_ms=10))
    ours = skewed_run(fluxlb.holdfast(collect_ms=100))
    assert printed.rate(2) < 0.9 * still.rate(2)
    assert derived.rate(2) > still.rate(2) and ours.rate(2) > still.rate(2)


def test_memory_of_other_machines_is_better_than_the_disk() -> None:
    throughput, latency = fluxlb.one_pressed(SMALL)
    assert value(throughput, "static", 11) < 60
    assert value(throughput, "Holdfast", 11) > 600
    assert value(latency, "Holdfast", 12) < 0.1


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"4.2": fluxlb.rotating_load, "4.15": fluxlb.heavy_mix}
    tiny = FluxlbEffort(buffers=(0, 512), rotation_s=1, mixed_s=4)
    monkeypatch.setattr(fluxlb, "QUICK", tiny)
    monkeypatch.setattr(fluxlb, "EXPERIMENTS", short)
    out, found = tmp_path / "figures", tmp_path / "found.json"
    assert main(["paper", "fluxlb", "--quick", "--out", str(out), "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert set(result["tables"]) == {"4.2", "4.15a", "4.15b"}
    for name, table in result["tables"].items():
        assert all(len(s["values"]) == len(table["places"]) for s in table["series"])
        assert table["notes"]
        ET.parse(out / f"fluxlb-{name}.svg")
