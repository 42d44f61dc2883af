"""Reading of traces for a replay."""

from __future__ import annotations

import gzip
import json

import pytest

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.traces import trace_block_tokens
from dynamo.operations.replay.events import read_events
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
    fields = {"input_length": 512, "output_length": 5, "hash_ids": list(blocks)}
    return {"timestamp": timestamp, **fields, **more}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_rows_come_in_order_of_time_from_zero(write, name):
    path = write(row(5000), row(2000), row(3000), name=name)
    conversations = read_trace(path, ArrivalOptions(speed=2.0))
    starts = [
        (conversation.start_s, conversation.requests[0].row) for conversation in conversations
    ]
    assert starts == [(0, 1), (0.5, 2), (1.5, 0)]


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


def test_an_error_counts_blank_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n{\n")
    with pytest.raises(ConfigError, match="jsonl:3: "):
        read_trace(str(path), ArrivalOptions())
    with pytest.raises(ConfigError, match="jsonl, line 3: "):
        read_events(str(path))


def test_a_truncated_file_is_rejected(write, tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    write(*(row(timestamp) for timestamp in range(100)), name=path.name)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ConfigError, match="ended before"):
        read_trace(str(path), ArrivalOptions())


@pytest.mark.parametrize("wrong", [{"input_length": -1}, {"output_length": -1}, {"delay": -5}])
def test_lengths_and_delays_are_not_negative(write, wrong):
    with pytest.raises(ConfigError, match=r"jsonl:2: .*>= 0"):
        read_trace(write(row(0), row(0, **wrong)), ArrivalOptions())


def test_a_trace_that_is_not_in_order_is_sorted_and_said(write, capsys):
    path = write(
        *({"timestamp": time, "input_length": 8, "output_length": 2} for time in (2000, 0, 1000))
    )
    starts = [conversation.start_s for conversation in read_trace(path, ArrivalOptions())]
    assert starts == [0, 1, 2]
    assert "2 lines are not in order" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"timestamp": 0}, {"timestamp": 1.7e12}], "span"),
        ([{"input_length": 10**12}], "input_length"),
        ([{"output_length": 10**12}], "output_length"),
    ],
)
def test_times_and_lengths_that_cannot_be_are_rejected(write, rows, message):
    path = write(*({"input_length": 8, "output_length": 2} | row for row in rows))
    with pytest.raises(ConfigError, match=message):
        read_trace(path, ArrivalOptions())


def test_jitter_delays_conversations_within_bounds_by_the_seed(write):
    path = write(*(row(3000 * (number // 10)) for number in range(100)))
    exact = read_trace(path, ArrivalOptions())
    delayed = read_trace(path, ArrivalOptions(jitter_s=3.0, seed=1))
    starts = {conversation.requests[0].row: conversation.start_s for conversation in exact}
    delays = [
        conversation.start_s - starts[conversation.requests[0].row] for conversation in delayed
    ]
    assert all(0 <= delay < 3 for delay in delays)
    assert len(set(delays)) == 100
    assert delayed == read_trace(path, ArrivalOptions(jitter_s=3.0, seed=1))
    assert delayed != read_trace(path, ArrivalOptions(jitter_s=3.0, seed=2))


def test_a_block_id_identifies_the_whole_prefix():
    block_ids = PrefixBlockIds()
    first, second = block_ids.assign([1, 2, 3]), block_ids.assign([9, 2, 3])
    assert block_ids.assign([1, 2, 4])[:2] == first[:2]
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("trace", "block", "tokens", "expected"),
    [(512, 64, 1000, 15), (64, 64, 200, 3), (16, 64, 200, 3), (512, 64, 63, 0)],
)
def test_blocks_are_split_and_joined(trace, block, tokens, expected):
    block_ids = PrefixBlockIds().assign(range(-(-tokens // trace)))
    hashes = TraceBlockConverter(trace, block).block_hashes(TraceRequest(0, tokens, 1, block_ids))
    assert len(hashes) == len(set(hashes)) == expected
    longer = PrefixBlockIds().assign(range(50))
    whole = TraceBlockConverter(trace, block).block_hashes(TraceRequest(0, 50 * trace, 1, longer))
    assert whole[: len(hashes)] == hashes, "a prefix keeps its blocks"
    assert len(whole) == 50 * trace // block


def test_block_sizes_that_are_no_multiples_are_rejected():
    with pytest.raises(ConfigError, match="500"):
        TraceBlockConverter(500, 64)


def test_an_empty_or_invalid_trace_is_rejected(write):
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(write(), ArrivalOptions())
    with pytest.raises(ConfigError, match=":1:"):
        read_trace(write({"timestamp": 1}), ArrivalOptions())
    with pytest.raises(ConfigError):
        read_trace("/no/such/trace", ArrivalOptions())


def test_the_rest_of_a_damaged_record_is_read_in_order_of_arrival(tmp_path, capsys):
    late = row(9000, block_tokens=64, end="cancelled", worker="w")
    (tmp_path / "a-00001.jsonl").write_text(json.dumps(late) + '\n{"timestamp": 1, "inp')
    (tmp_path / "b-00001.jsonl").write_text("\0\0\n" + json.dumps(row(4000, session="s")) + "\n")
    (tmp_path / "salt").write_bytes(b"\xff" * 32)
    conversations = read_trace(str(tmp_path), ArrivalOptions())
    assert [conversation.start_s for conversation in conversations] == [0, 5]
    assert "2 damaged lines" in capsys.readouterr().err
    assert trace_block_tokens(str(tmp_path)) == 64


def test_a_record_without_requests_is_no_trace(tmp_path):
    (tmp_path / "a-00001.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(str(tmp_path), ArrivalOptions())


def test_each_choice_of_a_prompt_is_a_request(write):
    path = write(row(0, choices=3), row(1000))
    conversations = read_trace(path, ArrivalOptions())
    assert [(each.start_s, each.requests[0].row) for each in conversations] == [
        (0, 0),
        (0, 2),
        (0, 3),
        (1, 1),
    ]
    assert trace_block_tokens(path) == 512
