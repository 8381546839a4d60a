"""The picture of `holdfast bench protections`, with made-up figures."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from holdfast.lab.bench import protections
from holdfast.lab.bench.tradeoff import LEAST_MS, by_flow, picture, spots
from holdfast.ui.cli import main
from holdfast.ui.report import Figure

MADE_UP = {
    "pairs": ((0.64, 0.66, 0.70), (0.0, 5.0, 90.0)),
    "active": ((0.69, 0.70, 0.71), (0.0, 4.0, 60.0)),
    "passive": ((0.80, 0.84, 0.85), (280.0, 320.0, 410.0)),
    "upstream": ((0.93, 0.94, 1.02), (70.0, 95.0, 130.0)),
}


def said(rates: tuple[float, ...], times: tuple[float, ...]) -> dict[str, Any]:
    return {
        "rate": Figure(rates).median,
        "rates": Figure(rates),
        "full_recovery_ms": Figure(times).median,
        "full_recoveries_ms": Figure(times),
    }


def figures() -> dict[str, Any]:
    """As `bench` gives them: those of the first flow beside the others."""
    plain = {"none": {"rows_per_s": Figure((1e6,))}}
    flow = plain | {name: said(*given) for name, given in MADE_UP.items()}
    return flow | {"dmz": {k: flow[k] for k in ("none", "pairs")}, "stateless": dict(flow)}


def test_figures_by_flow() -> None:
    found = by_flow(figures())
    assert list(found) == ["events", "dmz", "stateless"]
    assert set(found["events"]) == {"none", *MADE_UP}
    assert set(found["dmz"]) == {"none", "pairs"}


def test_a_spot_has_its_repeats() -> None:
    found = {(s.flow, s.protection): s for s in spots(figures())}
    assert len(found) == 4 + 1 + 4  # nothing is drawn of none: everything is relative to it
    pairs = found["events", "pairs"]
    assert pairs.overhead == pytest.approx((34, 30, 36))
    assert pairs.recovery_ms == (5.0, LEAST_MS, 90.0)
    assert found["events", "upstream"].overhead[1] == pytest.approx(-2)


def test_everything_is_inside_the_picture() -> None:
    root = ET.fromstring(picture(figures()))
    tag = "{http://www.w3.org/2000/svg}"
    discs = root.findall(f"{tag}circle")
    assert len(discs) == 4 + 1  # events, and the one in the legend
    for disc in discs:
        assert 0 < float(disc.attrib["cx"]) < 860 and 0 < float(disc.attrib["cy"]) < 430
    names = {t.text for t in root.iter(f"{tag}text")}
    assert names >= {*MADE_UP, "events", "dmz", "stateless"}


@pytest.mark.parametrize("folder", [None, "pictures"])
def test_where_it_is_written(
    folder: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(protections, "bench", lambda **_: figures())
    found = tmp_path / "found.json"
    out = ["--out", str(tmp_path / folder)] if folder else []
    assert main(["bench", "protections", "--json", str(found), *out]) == 0
    drawn = (tmp_path / folder if folder else tmp_path) / "found.svg"
    ET.parse(drawn)
    assert str(drawn) in capsys.readouterr().out
    assert json.loads(found.read_text())["pairs"]["rates"]["max"] == 0.70


def test_other_benchmarks_draw_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", "--out", str(tmp_path)]) == 2
    assert "has no chart" in capsys.readouterr().err
