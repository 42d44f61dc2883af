"""Traces as they are read."""

from __future__ import annotations

import gzip
import json

import pytest

from dynamo.core.errors import ConfigError
from dynamo.operations.replay.trace import (
    ArrivalOptions,
    PrefixBlockIds,
    TraceBlockConverter,
    TraceRequest,
    read_trace,
)


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="trace.jsonl"):
        path = tmp_path / name
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return write


def row(timestamp, blocks=(1,), **more):
    about = {"input_length": 512, "output_length": 5, "hash_ids": list(blocks)}
    return {"timestamp": timestamp, **about, **more}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_rows_come_in_order_of_time_from_zero(write, name):
    path = write(row(5000), row(2000), row(3000), name=name)
    found = read_trace(path, ArrivalOptions(speed=2.0))
    assert [(one.start_s, one.requests[0].row) for one in found] == [(0, 1), (0.5, 2), (1.5, 0)]


def test_rows_of_a_session_follow_each_other(write):
    rows = [
        row(1000, session_id="a"),
        row(1500),
        {**row(0, session_id="a", delay=300), "timestamp": 0},
    ]
    first, second = read_trace(write(*rows), ArrivalOptions(speed=3.0))
    assert [turn.row for turn in first.requests] == [0, 2]
    assert first.requests[1].delay_s == pytest.approx(0.1)
    assert [turn.row for turn in second.requests] == [1]


def test_a_file_that_was_cut_off_is_told(write, tmp_path):
    whole = tmp_path / "trace.jsonl.gz"
    write(*(row(at) for at in range(100)), name=whole.name)
    whole.write_bytes(whole.read_bytes()[:60])
    with pytest.raises(ConfigError, match="ended before"):
        read_trace(str(whole), ArrivalOptions())


@pytest.mark.parametrize("wrong", [{"input_length": -1}, {"output_length": -1}, {"delay": -5}])
def test_lengths_and_delays_are_not_negative(write, wrong):
    with pytest.raises(ConfigError, match=r"jsonl:2: .*>= 0"):
        read_trace(write(row(0), row(0, **wrong)), ArrivalOptions())


def test_smearing_delays_within_bounds_and_by_the_seed(write):
    path = write(*(row(3000 * (at // 10)) for at in range(100)))
    plain = read_trace(path, ArrivalOptions())
    smeared = read_trace(path, ArrivalOptions(jitter_s=3.0, seed=1))
    starts = {one.requests[0].row: one.start_s for one in plain}
    late = [one.start_s - starts[one.requests[0].row] for one in smeared]
    assert all(0 <= delay < 3 for delay in late)
    assert len(set(late)) == 100
    assert smeared == read_trace(path, ArrivalOptions(jitter_s=3.0, seed=1))
    assert smeared != read_trace(path, ArrivalOptions(jitter_s=3.0, seed=2))


def test_a_block_s_name_stands_for_all_before_it():
    names = PrefixBlockIds()
    one, other = names.assign([1, 2, 3]), names.assign([9, 2, 3])
    assert names.assign([1, 2, 4])[:2] == one[:2]
    assert not set(one) & set(other)


@pytest.mark.parametrize(
    ("trace", "block", "tokens", "expected"),
    [
        (512, 64, 1000, 15),
        (64, 64, 200, 3),
        (16, 64, 200, 3),
        (512, 64, 63, 0),
    ],
)
def test_blocks_are_cut_and_joined(trace, block, tokens, expected):
    names = PrefixBlockIds().assign(range(-(-tokens // trace)))
    hashes = TraceBlockConverter(trace, block).block_hashes(TraceRequest(0, tokens, 1, names))
    assert len(hashes) == len(set(hashes)) == expected
    longer = PrefixBlockIds().assign(range(50))
    whole = TraceBlockConverter(trace, block).block_hashes(TraceRequest(0, 50 * trace, 1, longer))
    assert whole[: len(hashes)] == hashes, "a prefix keeps its blocks"
    assert len(whole) == 50 * trace // block


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="500"):
        TraceBlockConverter(500, 64)


def test_an_empty_or_broken_trace_is_refused(write):
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(write(), ArrivalOptions())
    with pytest.raises(ConfigError, match=":1:"):
        read_trace(write({"timestamp": 1}), ArrivalOptions())
    with pytest.raises(ConfigError):
        read_trace("/no/such/trace", ArrivalOptions())
