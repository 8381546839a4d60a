"""The tables of the model: they answer as a dict and a set do."""

import numpy as np

from holdfast.lab.model.memo import Fingerprints, Memo


def test_a_memo_computes_each_key_once() -> None:
    asked: list[int] = []

    def compute(key: int) -> int:
        asked.append(key)
        return key % 1_000 - 500

    memo, draw = Memo(compute), np.random.default_rng(1)
    for _ in range(20):
        keys = draw.integers(0, 30_000, 2_000) << 30
        assert memo(keys).tolist() == [k % 1_000 - 500 for k in keys.tolist()]
    assert len(asked) == len(set(asked)) == memo.size


def test_fingerprints_tell_what_is_new() -> None:
    found, seen, draw = Fingerprints(), set[int](), np.random.default_rng(2)
    for _ in range(20):
        hashes = draw.integers(1, 150_000, 10_000).astype(np.uint64)
        new = found.add(hashes)
        expected = set(hashes.tolist()) - seen
        assert sorted(hashes[new].tolist()) == sorted(expected)
        seen |= expected
    assert found.size == len(seen)
