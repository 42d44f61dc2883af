"""The record of requests: what is in a line, and how files are written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.router.fake_cluster import FakeCluster

from dynamo.core.clock import SystemClock
from dynamo.core.settings.schema import RecordSettings
from dynamo.core.text import TextOptions
from dynamo.operations.bench.traces import TraceRow
from dynamo.scheduling.request_record import RecordMaker, RequestRecord, request_facts
from dynamo.scheduling.router.attempt import Attempt
from dynamo.scheduling.router.policy import Decision
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.services.planning.record import RecordFiles, RequestRecorder
from dynamo.telemetry import Registry
from dynamo.telemetry.story import Story
from dynamo.testing.fakes import CollectedReply

SALT = b"s" * 32


def make_story(**fields: Any) -> Story:
    headers = {b"x-session-id": b"Alice"}
    options = TextOptions(priority=2)
    story = Story("r", "r", "/v1/chat", "m", 10.0, 10.0, headers, options, False, 1)
    story.prompt_tokens, story.output_tokens, story.ended_s = 200, 7, 11.5
    for name, value in fields.items():
        setattr(story, name, value)
    story.close(1_699_999_990.5)
    return story


def attempt(placed: PlacedRequest) -> Attempt:
    decision = Decision(placed.worker.instance, "kv", 1)
    return Attempt(CollectedReply(), placed, Ledger(), decision=decision)


def make_record(story: Story, salt: bytes) -> RequestRecord:
    return RecordMaker(salt).make(request_facts(story))


def test_a_moved_request_has_its_last_worker_and_its_first_token() -> None:
    cluster = FakeCluster(2)
    cluster.now = 10.25
    states = cluster.worker_states
    hashes = range(1, 13)
    first = cluster.ledger.place("r/0/0", states["a"], Prompt(200, hashes), new_tokens=200)
    cluster.now = 10.5
    cluster.first_token(first)
    cluster.end(first)
    cluster.now = 10.75
    again = cluster.ledger.place("r/0/16", states["b"], Prompt(203, hashes), new_tokens=203)
    cluster.end(again)
    record = make_record(make_story(attempts=[attempt(first), attempt(again)]), SALT)
    assert (record.worker, record.moves, record.prefill_worker) == ("b", 1, "")
    assert (record.input_length, record.output_length, record.priority) == (200, 7, 2)
    assert (record.queue_ms, record.ttft_ms, record.e2e_ms) == (250.0, 500.0, 1500.0)
    assert (record.block_tokens, len(record.hash_ids)) == (64, 3)
    line = msgspec.json.encode(record)
    row = msgspec.json.decode(line, type=TraceRow)
    assert (row.timestamp, row.input_length, row.output_length) == (1_700_000_000_500.0, 200, 7)
    assert row.hash_ids == record.hash_ids
    assert b"Alice" not in line


def test_equal_prompts_have_equal_hashes_only_under_the_same_salt() -> None:
    cluster = FakeCluster(1)

    def record(salt: bytes, hashes: list[int]) -> RequestRecord:
        place, worker = cluster.ledger.place, cluster.worker_states["a"]
        placed = place("r/0/0", worker, Prompt(200, hashes), new_tokens=200)
        return make_record(make_story(attempts=[attempt(placed)]), salt)

    prompt, branch = list(range(8)), [0, 1, 2, 3, 9, 9, 9, 9]
    own, same, other = record(SALT, prompt), record(SALT, prompt), record(b"t" * 32, prompt)
    assert own.hash_ids == same.hash_ids
    assert own.hash_ids[:1] == record(SALT, branch).hash_ids[:1]
    assert own.hash_ids[1] != record(SALT, branch).hash_ids[1]
    assert not set(own.hash_ids) & set(other.hash_ids)
    assert own.session == same.session != other.session != ""


def test_a_request_without_a_worker_has_its_end() -> None:
    record = make_record(make_story(end="overloaded", output_tokens=0), SALT)
    assert (record.end, record.queue_ms, record.ttft_ms) == ("overloaded", None, None)
    assert record.worker == ""


def make_recorder(folder: Path, **settings: Any) -> tuple[RequestRecorder, Registry]:
    clock, registry = SystemClock(), Registry()
    files = RecordFiles(lambda: folder, "frontend-1", RecordSettings(**settings), clock)
    return RequestRecorder(files, clock, registry), registry


def read_lines(folder: Path) -> list[RequestRecord]:
    return [
        msgspec.json.decode(line, type=RequestRecord)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


async def test_what_is_pending_is_written_at_the_end(tmp_path: Path) -> None:
    recorder, registry = make_recorder(tmp_path / "record")
    for number in range(3):
        recorder.add([make_story(output_tokens=number)])
    await recorder.close()
    assert [record.output_length for record in read_lines(tmp_path / "record")] == [0, 1, 2]
    assert (tmp_path / "record").stat().st_mode & 0o077 == 0
    assert "dynamo_record_requests_total 3" in registry.render()


async def test_a_full_disk_leaves_no_part_of_a_line_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, registry = make_recorder(tmp_path)
    write = os.write
    recorder.add([make_story()])
    await recorder._write_pending()
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:40]))
        recorder.add([make_story()])
        await recorder._write_pending()
    with monkeypatch.context() as full:

        def fail(file: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(os, "write", fail)
        recorder.add([make_story()])
        await recorder._write_pending()
    recorder.add([make_story(output_tokens=9)])
    await recorder.close()
    assert [record.output_length for record in read_lines(tmp_path)] == [7, 9]
    assert "dynamo_record_lost_total 2" in registry.render()


async def test_old_files_and_those_beyond_the_size_are_deleted(tmp_path: Path) -> None:
    recorder, _ = make_recorder(tmp_path, keep=100.0, max_bytes=1 << 20)
    (tmp_path / "other-1.jsonl").write_bytes(b"{}\n")
    os.utime(tmp_path / "other-1.jsonl", (1, 1))
    story = make_story(model="m" * 1000)
    for _ in range(24):
        for _ in range(70):
            recorder.add([story])
        await recorder._write_pending()
    await recorder.close()
    files = list(tmp_path.glob("*.jsonl"))
    assert not (tmp_path / "other-1.jsonl").exists()
    assert sum(path.stat().st_size for path in files) <= 1 << 20
    assert len(files) >= 12


def test_a_file_is_complete_with_a_part_of_the_time_that_lines_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, now = SystemClock(), [1e9]
    monkeypatch.setattr(clock, "wall", lambda: now[0])
    files = RecordFiles(lambda: tmp_path, "frontend-1", RecordSettings(keep=1600.0), clock)
    for _ in range(4):
        files.write([request_facts(make_story())])
        now[0] += 50.0
    files.close()
    assert [path.read_bytes().count(b"\n") for path in sorted(tmp_path.glob("*.jsonl"))] == [2, 2]


async def test_lines_go_to_a_new_file_after_somebody_has_deleted_the_old_one(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "record"
    recorder, registry = make_recorder(folder)
    recorder.add([make_story()])
    await recorder._write_pending()
    shutil.rmtree(folder)
    recorder.add([make_story(output_tokens=9)])
    await recorder._write_pending()
    for path in folder.glob("*.jsonl"):
        path.unlink()
    recorder.add([make_story(output_tokens=5)])
    await recorder.close()
    assert [record.output_length for record in read_lines(folder)] == [5]
    assert "dynamo_record_requests_total 3" in registry.render()
