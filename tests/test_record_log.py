"""The records that a control remembers: what comes out is what went in, in a bounded space."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.control.record_log import GROUP, RecordLog, packed, unpacked
from holdfast.core.records import EpochRecord, Range, pack_step

NUMBERS = st.integers(-(2**62), 2**62)
SPLITS = st.tuples(st.integers(0, 3), st.integers(0, 300))


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    start, count = draw(st.integers(0, 2**50)), draw(st.integers(0, 2**40))
    step = draw(st.none() | NUMBERS)
    steps = pack_step(start, step) if step is not None else b""
    return Range(*draw(SPLITS), start, start + count, steps)


@st.composite
def records(draw: st.DrawFn) -> EpochRecord:
    return EpochRecord(
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 2**60)),
        tuple(draw(st.lists(ranges(), max_size=6))),
        tuple(draw(st.lists(SPLITS, max_size=3))),
        *(draw(st.booleans()) for _ in range(3)),
    )


@given(st.lists(records(), max_size=8))
def test_records_come_out_as_they_went_in(made: list[EpochRecord]) -> None:
    assert unpacked(packed(made)) == made


def record(epoch: int, splits: int, rows: int = 20) -> EpochRecord:
    """An epoch of a flow whose splits advance evenly, about 1 s of event time an epoch."""
    parts = [
        Range(0, s, epoch * rows, (epoch + 1) * rows, b"".join(
            pack_step(epoch * rows + n, 1_700_000_000_000 + epoch * 1_000 + s * 7 + n)
            for n in range(3)
        ))
        for s in range(splits)
    ]  # fmt: skip
    return EpochRecord(epoch, epoch * rows * splits, tuple(parts))


def test_records_that_are_packed_are_the_same_as_those_that_are_not() -> None:
    log = RecordLog()
    made = [record(epoch, 3) for epoch in range(5 * GROUP)]
    for one in made:
        log.add(one)
        log.add(made[max(0, one.epoch - 200)])  # another sequencer repeats what it knows
    assert log.all() == [one.summary() for one in made] and log.last == made[-1].summary()


def test_records_of_200_splits_stay_within_their_bytes() -> None:
    """As objects they took 36 KB an epoch, 3.6 GB in all."""
    log, epochs = RecordLog(bytes_max=200_000), 20 * GROUP
    for epoch in range(epochs):
        log.add(record(epoch, 200))
        assert log.nbytes <= 200_000
    found = [one.epoch for one in log.all()]
    assert found == list(range(epochs - len(found), epochs))
    assert len(found) > 4 * GROUP, "an epoch takes less than 800 bytes"
