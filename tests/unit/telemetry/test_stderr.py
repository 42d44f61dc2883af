"""Standard error that never blocks: order, loss, and descriptors of every kind."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo.telemetry import stderr
from dynamo.telemetry.stderr import MAX_PENDING_BYTES, NonBlockingWriter

LINE = b"x" * 99 + b"\n"


def write_lines(writer: NonBlockingWriter, count: int) -> float:
    """Write numbered lines of 100 bytes and return the seconds."""
    began = time.monotonic()
    for number in range(count):
        writer.write(b"%099d\n" % number)
    return time.monotonic() - began


def read_until(fd: int, end: bytes) -> bytes:
    """Read until `end` arrived."""
    data = b""
    while end not in data:
        data += os.read(fd, 1 << 16)
    return data


def test_lines_to_an_unread_pipe_are_kept_in_order_then_dropped_and_counted() -> None:
    reader, fd = os.pipe()
    writer = NonBlockingWriter(fd)
    count = 2 * MAX_PENDING_BYTES // len(LINE)

    assert write_lines(writer, count) < 5
    assert writer.dropped_lines > count // 4
    written = count - writer.dropped_lines
    text = read_until(reader, b"lost\n").decode()

    lines = text.splitlines()
    assert [int(line) for line in lines[:written]] == list(range(written))
    assert lines[written:] == [f"{count - written} log lines were lost"]
    writer.drain(5)
    writer.write(b"next\n")
    assert os.read(reader, 99) == b"next\n"


def test_the_flags_of_the_descriptor_stay() -> None:
    _, fd = os.pipe()
    writer = NonBlockingWriter(fd)
    write_lines(writer, 2000)

    assert os.get_blocking(fd)


def test_a_stopped_terminal_does_not_block() -> None:
    terminal, fd = pty.openpty()
    writer = NonBlockingWriter(fd)
    assert writer.isatty()
    os.write(terminal, b"\x13")
    time.sleep(0.1)

    assert write_lines(writer, 20_000) < 5
    assert writer.dropped_lines > 0

    os.write(terminal, b"\x11")
    assert f"{writer.dropped_lines} log lines were lost" in read_until(terminal, b"lost").decode()


def test_a_socket_does_not_block() -> None:
    reader, end = socket.socketpair()
    with reader, end:
        writer = NonBlockingWriter(end.fileno())
        assert write_lines(writer, 20_000) < 5
        assert writer.dropped_lines > 0
        assert read_until(reader.fileno(), b"lost\n").startswith(b"%099d\n" % 0)
        writer.drain(5)


def test_a_thread_writes_where_the_descriptor_cannot_be_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/proc is missing, or the pipe belongs to another user."""
    monkeypatch.setattr(stderr, "_open_nonblocking", lambda fd: None)
    reader, fd = os.pipe()
    writer = NonBlockingWriter(fd)

    assert write_lines(writer, 20_000) < 5
    assert writer.dropped_lines > 0
    data = read_until(reader, b"lost\n")
    assert data.startswith(b"%099d\n%099d\n" % (0, 1))


def test_files_are_written_through_at_their_own_position(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.write(b"before\n")
        file.flush()
        NonBlockingWriter(file.fileno()).write(LINE)
        file.write(b"after\n")

    assert (tmp_path / "log").read_bytes() == b"before\n" + LINE + b"after\n"


def test_a_reader_that_is_gone_raises_nothing() -> None:
    reader, fd = os.pipe()
    writer = NonBlockingWriter(fd)
    write_lines(writer, 2000)
    os.close(reader)
    for _ in range(10):
        writer.drain(5)
        write_lines(writer, 2000)
    writer.drain(5)

    assert writer.dropped_lines == 0


def test_a_large_text_is_not_cut() -> None:
    reader, fd = os.pipe()
    writer = NonBlockingWriter(fd)
    text = b"y" * (2 * MAX_PENDING_BYTES) + b"\n"

    assert writer.write(text) == len(text)
    assert read_until(reader, b"\n") == text


PROGRAM = """
import logging, sys
from dynamo.telemetry.logs import configure_logging
from dynamo.telemetry.stderr import dropped_lines, unblock_stdout
configure_logging("info", {fmt!r}, "test")
unblock_stdout()
for number in range({lines}):
    logging.getLogger("a").info("line", extra={{"fields": {{"number": number}}}})
print("printed", flush=True)
print("written", file=sys.stderr)
sys.stdin.read()
raise RuntimeError("the end")
"""


def start(
    lines: int, fmt: str = "text", stderr: int = subprocess.STDOUT
) -> subprocess.Popen[bytes]:
    """Start a process that logs, prints, waits for the end of input and ends by an exception."""
    program = PROGRAM.format(lines=lines, fmt=fmt)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=stderr)


def test_all_output_of_a_process_is_in_order_with_its_traceback() -> None:
    output = start(100).communicate(timeout=20)[0].decode().splitlines()

    assert [line.rsplit("=")[-1] for line in output[:100]] == [str(n) for n in range(100)]
    assert output[100:103] == ["printed", "written", "Traceback (most recent call last):"]
    assert output[-1] == "RuntimeError: the end"


def test_a_process_ends_though_nobody_reads() -> None:
    with start(20_000) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 1


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_the_loss_is_reported_as_a_line_of_the_log(fmt: str) -> None:
    with start(20_000, fmt, subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"printed\n"
        lines = process.communicate(timeout=20)[1].decode().splitlines()

    losses = [line for line in lines if "lost because nobody read stderr" in line]
    assert len(losses) == 1
    assert losses[0].startswith("{" if fmt == "json" else "20")


def test_streams_that_a_test_replaced_stay(capsys: pytest.CaptureFixture[str]) -> None:
    assert stderr.unblock_stderr() is sys.stderr
    assert not isinstance(getattr(sys.stderr, "buffer", None), NonBlockingWriter)
