"""The timeline of a run: order, summing up, and pictures that any viewer can read."""

import random
import xml.etree.ElementTree as ET

import pytest

from holdfast.lab.sim.command import save
from holdfast.lab.sim.timeline import OUTSIDE, TimelineEvent, lanes_of
from holdfast.lab.sim.timeline_picture import svg_timeline
from holdfast.lab.sim.timeline_text import text_timeline

SVG = "{http://www.w3.org/2000/svg}"


def run(epochs: int = 20, sites: int = 4, seed: int = 0) -> list[TimelineEvent]:
    """What a run with a pause, a reset connection and a crash might look like."""
    rng = random.Random(seed)
    crash, dead = 0.0124 * epochs / 2 + 0.004, 2
    events = [TimelineEvent(0, "view", -1, "view 0.0 of 0 1 2 3: 0,1 | 0,1 1,2 2,3 3,0 | 3,0")]

    def alive(site: int, at: float) -> bool:
        return site != dead or at < crash

    def message(kind: str, at: float, site: int, other: int, text: str) -> float:
        arrives = at + rng.uniform(0.0004, 0.0016)
        lost = not alive(other, arrives)
        events.append(TimelineEvent(at, kind, site, text, other, None if lost else arrives))
        if not lost:
            events.append(TimelineEvent(arrives, "arrive", other, text, site))
        return arrives

    replicas = [[(c + k) % sites for k in (0, 1)] for c in range(sites)]
    for epoch in range(epochs):
        base = 0.002 + 0.0124 * epoch + rng.uniform(0, 0.001)
        events.append(TimelineEvent(base, "control", 0, f"record epoch {epoch}", -1, base + 0.0005))
        for source in (0, 1):
            done = base + 0.0011
            events.append(
                TimelineEvent(base, "work", source, f"packets/0 epoch {epoch}", None, done)
            )
        for group, (first, second) in enumerate(replicas):
            ready = {}
            for to in (first, second):
                source = group % 2
                if alive(to, base):
                    text = f"bundle x0 epoch {epoch}"
                    ready[to] = message("send", base + 0.0012, source, to, text)
            for to, at in ready.items():
                if not alive(to, at + 0.002):
                    continue
                begin = max(at, base + 0.002) + 0.0004 * group
                took = begin + rng.uniform(0.0006, 0.0014)
                events.append(
                    TimelineEvent(begin, "work", to, f"sessions/{group} epoch {epoch}", None, took)
                )
                message("ack", took, to, group % 2, f"ack x0 epoch {epoch}")
                message("send", took, to, 3 if to == first else 0, f"bundle x1 epoch {epoch}")
        for sink in (3, 0):
            begin = base + 0.0072
            events.append(
                TimelineEvent(begin, "work", sink, f"alerts/0 epoch {epoch}", None, begin + 0.0009)
            )
        events.append(
            TimelineEvent(
                base + 0.0082, "deliver", 3, f"delivery epoch {epoch}", OUTSIDE, base + 0.0088
            )
        )
    late = crash + 0.03
    events += [
        TimelineEvent(crash - 0.05, "fault", 1, "pause of site 1", None, crash - 0.038),
        TimelineEvent(crash - 0.022, "fault", 0, "reset of 0-3", 3),
        TimelineEvent(crash, "fault", dead, "crash of site 2"),
        TimelineEvent(crash + 0.004, "view", -1, "view 0.1 of 0 1 3: 0,1 | 0,1 1 3 3,0 | 3,0"),
        TimelineEvent(crash + 0.0041, "phase", 1, "sessions/1 taken over"),
        TimelineEvent(crash + 0.0042, "phase", 3, "sessions/2 taken over"),
        TimelineEvent(crash + 0.012, "note", 4, "site 4 registers"),
        TimelineEvent(crash + 0.012, "control", 4, "register", -1, crash + 0.0126),
        TimelineEvent(
            crash + 0.014, "view", -1, "view 0.2 of 0 1 3 4: 0,1 | 0,1 1+4 3+4 3,0 | 3,0"
        ),
        TimelineEvent(crash + 0.015, "control", -1, "catch up sessions/1", 1, crash + 0.0155),
        TimelineEvent(crash + 0.016, "phase", 4, "sessions/1 copying"),
        TimelineEvent(crash + 0.0165, "phase", 4, "sessions/2 copying"),
        TimelineEvent(crash + 0.022, "phase", 4, "sessions/1 replaying"),
        TimelineEvent(crash + 0.0232, "phase", 4, "sessions/2 replaying"),
        TimelineEvent(late, "view", -1, "view 0.3 of 0 1 3 4: 0,1 | 0,1 1,4 3,4 3,0 | 3,0"),
        TimelineEvent(late + 0.0005, "phase", 4, "sessions/1 protected"),
        TimelineEvent(late + 0.0006, "phase", 4, "sessions/2 protected"),
        TimelineEvent(late + 0.03, "fault", 0, "partition 0-1", 1, late + 0.042),
    ]
    rng.shuffle(events)
    return events


def lines(events: list[TimelineEvent], **options) -> list[str]:
    return text_timeline(events, **options).splitlines()


def test_nothing_is_a_timeline_too() -> None:
    assert text_timeline([]) == "nothing happened\n"
    assert ET.fromstring(svg_timeline([], "empty")).tag == f"{SVG}svg"


def test_lines_are_in_order_of_time_and_indented_by_lane() -> None:
    events = [
        TimelineEvent(0.002, "note", 1, "second"),
        TimelineEvent(0.0015, "note", 0, "first"),
        TimelineEvent(0.003, "view", -1, "view 0.1"),
    ]
    assert lines(events) == [
        "        1.50     site 0    first",
        "        2.00       site 1  second",
        "        3.00 = controller  view 0.1",
    ]


def test_full_detail_has_a_line_for_every_event() -> None:
    events = run()
    assert len(lines(events, full=True)) == len(events)


def test_runs_of_similar_messages_are_summed_up() -> None:
    epochs = [4, 4, 5, 6, 6]
    events = [
        TimelineEvent(i / 1e3, "send", 0, f"bundle x{i % 2} epoch {e}", 2, (i + 1) / 1e3)
        for i, e in enumerate(epochs)
    ]
    events.append(TimelineEvent(0.0035, "ack", 2, "ack x0 epoch 4", 0, 0.004))
    events.append(TimelineEvent(0.2, "fault", 1, "crash of site 1"))
    assert [line.split("  ")[-1].strip() for line in lines(events, lines_max=4)] == [
        "5 bundles 0->2 epochs 4-6 (until 5.00)",
        "ack x0 epoch 4 2->0 (arrives 4.00)",
        "crash of site 1",
    ]
    assert lines(events, lines_max=2)[0].endswith("5 send, 1 ack, epochs 4-6 (until 5.00)")


def test_an_arrival_is_told_once() -> None:
    sent = TimelineEvent(0, "send", 0, "bundle epoch 1", 1, 0.001)
    came, alone = (
        TimelineEvent(0.001, "arrive", 1, sent.text, 0),
        TimelineEvent(0.002, "arrive", 1, "old", 0),
    )
    assert [line[-9:] for line in lines([sent, came, alone])] == ["ves 1.00)", " old 1<-0"]


@pytest.mark.parametrize("epochs", [1, 20, 100, 400])
def test_long_runs_stay_short_and_keep_all_that_matters(epochs: int) -> None:
    events = run(epochs)
    told = lines(events)
    assert len(told) <= 200
    for event in events:
        if event.kind in ("fault", "view", "phase"):
            assert any(event.text in line for line in told)


def test_there_is_more_detail_near_a_fault() -> None:
    told = lines(run(200))
    crash = next(i for i, line in enumerate(told) if "crash of" in line)
    near = [float(line.split()[0].replace(",", "")) for line in told[crash - 5 : crash + 6]]
    assert near[-1] - near[0] < 20  # milliseconds, of 2,500


def test_more_landmarks_than_lines_leave_the_faults() -> None:
    events = [TimelineEvent(i / 1e3, "phase", 0, f"phase {i}") for i in range(500)]
    events += [
        TimelineEvent(0.25, "fault", 0, "crash of site 0"),
        TimelineEvent(0.26, "view", -1, "view 0.1"),
    ]
    told = lines(events)
    assert len(told) <= 200
    assert sum("crash of" in line or "view 0.1" in line for line in told) == 2


def test_long_lines_are_cut() -> None:
    told = lines([TimelineEvent(0, "note", 0, "word " * 100)], width=60)
    assert len(told[0]) == 60 and told[0].endswith("…")


def test_a_picture_has_what_happened() -> None:
    root = ET.fromstring(svg_timeline(run(), "a crash"))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "a crash" in texts
    for text in ("controller", "site 0", "site 4", "outside", "crash of site 2", "sessions"):
        assert text in texts
    assert any(t is not None and t.startswith("view 0.3") for t in texts)
    assert len(root.findall(f".//{SVG}path[@class='view']")) == 4
    assert len(root.findall(f".//{SVG}path[@class='cross']")) == 3
    assert len(root.findall(f".//{SVG}rect[@class='band']")) == 2


def test_texts_are_escaped() -> None:
    nasty = '<script>alert("&\'")</script>\x00\x1b\ud800 ]]> -->'
    for kind in ("fault", "view", "send", "ack", "work", "phase", "deliver", "control", "note"):
        drawn = svg_timeline(
            [TimelineEvent(0, kind, 0, nasty, 1), TimelineEvent(1, kind, 0, nasty)], nasty
        )
        assert "<script" not in drawn
        ET.fromstring(drawn)
        drawn.encode()


def test_a_crowded_picture_is_thinned_out_but_not_of_faults() -> None:
    events = run(200, 6)
    root = ET.fromstring(svg_timeline(events, "crowded"))
    frames = root.findall(f".//{SVG}path[@class='frame']")
    assert 100 < len(frames) < 1_500
    assert len(root.findall(f".//{SVG}path[@class='cross']")) == 3


def test_what_is_far_from_faults_is_faded() -> None:
    events = [
        TimelineEvent(i / 100, "work", 0, f"a/0 epoch {i}", None, i / 100 + 0.001)
        for i in range(99)
    ]
    bars = ET.fromstring(svg_timeline(events, "calm")).findall(f".//{SVG}rect[@opacity='1.0']")
    assert len(bars) == 99
    events.append(TimelineEvent(0.5, "fault", 0, "pause", None, 0.52))
    root = ET.fromstring(svg_timeline(events, "not so calm"))
    assert 0 < len(root.findall(f".//{SVG}rect[@opacity='1.0']")) < 30


def test_files(tmp_path) -> None:
    save(tmp_path / "run.svg", run(), "a run")
    save(tmp_path / "run.txt", run(), "a run")
    ET.parse(tmp_path / "run.svg")
    assert "crash of site 2" in (tmp_path / "run.txt").read_text()


def test_every_application_has_a_lane_for_its_control() -> None:
    said = [TimelineEvent(0.001 * n, "send", -1 - n, "view 1.0", 0, 0.01) for n in range(3)]
    assert lanes_of(said) == [-1, -2, -3, 0]
    assert "controller 2" in svg_timeline(said, "three applications")
    assert "controller 2" in text_timeline(said) and "outside" not in text_timeline(said)
