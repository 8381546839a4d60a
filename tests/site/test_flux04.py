"""The Flux paper's experiments again, on real sites: small runs, and how they are counted."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from holdfast.errors import InvariantError
from holdfast.lab.paper import flux04
from holdfast.lab.paper.flux04 import PAPER_BUFFER_S, FluxEffort, Speeds, trace, typical
from holdfast.lab.paper.flux04_report import pictures, relative_costs, relative_rates
from holdfast.lab.workloads.paced import Delivery
from holdfast.ui.cli import main

RATE = 1_000.0


def delivered(stall_s: float) -> list[Delivery]:
    """A hundred epochs a second; those of a stall come when it ends."""
    found = []
    for n in range(-300, 400):
        due = 50 + n / 100
        at = 50 + stall_s if 0.2 <= due - 50 < stall_s else due
        late_ms = (at - due) * 1e3 + 5.0
        found.append(Delivery(n, at, 10, 0, (late_ms, late_ms)))
    return found


def test_a_stall_is_a_dip_a_spike_and_drops() -> None:
    around = trace(delivered(1.0), 50.0, 51.2, RATE)
    assert around.lowest == 0.0 and around.highest > 300.0, "what was held up comes at once"
    assert around.low_s == pytest.approx(0.7, abs=0.15)
    assert around.gap_ms == pytest.approx(800.0, abs=1.0)
    assert around.dropped(PAPER_BUFFER_S) == pytest.approx(RATE * (0.8 - PAPER_BUFFER_S), abs=2)
    assert around.protected_s == pytest.approx(1.2)
    assert len(around.ends) == len(around.rate) == len(around.latency_ms)


def test_a_steady_flow_has_neither() -> None:
    around = trace(delivered(0.0), 50.0, 50.1, RATE)
    assert 90.0 < around.lowest <= around.highest < 110.0
    assert around.low_s == around.gap_ms == around.dropped(PAPER_BUFFER_S) == 0
    assert not around.too_busy
    assert trace(delivered(1.0), 51.1, 51.2, RATE).too_busy, "rows were late before the kill"
    silent = [d for d in delivered(0.0) if d.at > 50.5]
    assert trace(silent, 50.0, 50.1, RATE).too_busy, "no rows came before the kill"


def test_rows_that_are_lost_or_repeated_are_found() -> None:
    rows = 250_000
    right = flux04._expected(rows)
    whole = Delivery(3, 0.0, right["rows"], int(right["digest"], 16), (1.0, 1.0))
    flux04._check([whole], rows)
    for wrong in ([whole, whole], [], [Delivery(3, 0.0, right["rows"], 1, (1.0, 1.0))]):
        with pytest.raises(InvariantError):
            flux04._check(wrong, rows)


def test_pictures_have_the_paper_beside_what_was_measured() -> None:
    around = trace(delivered(1.0), 50.0, 51.2, RATE)
    speeds = {
        "none": Speeds([8.0, 10.0], [1.0, 1.0]),
        "cluster pairs": Speeds([4.0, 4.0], [2.0, 2.5]),
        "partition pairs": Speeds([4.0, 5.0], [2.0, 4.0]),
    }
    assert relative_rates(speeds, "cluster pairs") == (0.5, 0.4)
    assert relative_costs(speeds, "partition pairs") == (2.0, 4.0)
    drawn = pictures({a: [around] for a in flux04.KILLED}, speeds)
    texts = {name: " ".join(ET.fromstring(svg).itertext()) for name, svg in drawn.items()}
    assert "partition pairs, paper" in texts["rate"] and "cluster pairs, Holdfast" in texts["rate"]
    assert {"0.49", "0.44", "0.45"} <= set(texts["overhead"].split())
    assert "latency" in texts["latency"]


def test_the_typical_kill_is_the_one_with_the_median_gap() -> None:
    some = [trace(delivered(s), 50.0, 51.0, RATE) for s in (1.5, 0.5, 1.0)]
    assert typical(some) is some[2]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both experiments on real sites: the command checks every result to the last row."""
    tiny = FluxEffort(rate=20_000.0, kills=1, rows=250_000, repeats=1, warm_s=0.1)
    monkeypatch.setattr(flux04, "QUICK", tiny)
    monkeypatch.setattr(flux04, "AFTER_S", 0.5)
    monkeypatch.setattr(flux04, "BEFORE_S", 0.5)
    out, found = tmp_path / "figures", tmp_path / "found.json"
    assert main(["paper", "flux04", "--quick", "--out", str(out), "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert set(result["kills"]) == {"partition pairs", "cluster pairs"}
    assert all(some[0]["protected_s"] > 0 for some in result["kills"].values())
    assert set(result["overhead"]) == {"none", "partition pairs", "cluster pairs"}
    assert all(min(s["cpu_us"]) > 0 for s in result["overhead"].values())
    for name in ("rate", "latency", "overhead"):
        ET.parse(out / f"flux04-{name}.svg")
