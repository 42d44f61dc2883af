from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from dynamo.core.errors import ConfigError
from dynamo.telemetry import logs


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """The written lines. The logging of the test run is restored afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    yield stream
    logs.set_levels("info")
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_levels_in_the_syntax_of_rust_log() -> None:
    assert logs.parse_levels("info,dynamo.scheduling=debug, dynamo::runtime=OFF,hyper.http") == {
        "": logging.INFO,
        "dynamo.scheduling": logging.DEBUG,
        "dynamo.runtime": logs.OFF,
        "hyper.http": logs.TRACE,
    }
    assert logs.parse_levels("") == {}


@pytest.mark.parametrize("spec", ["dynamo=loud", "info,=noisy", "inof"])
def test_an_unknown_level_is_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(ConfigError, match="unknown log level") as caught:
        logs.parse_levels(spec)

    assert "debug" in caught.value.hint


def test_a_text_line_has_component_fields_and_request_id(lines: io.StringIO) -> None:
    logs.configure_logging("info", "text", "frontend", lines)
    token = logs.request_id.set("r-1")
    logging.getLogger("dynamo.x").info("worker joined", extra={"fields": {"name": "a b", "n": 3}})
    logs.request_id.reset(token)

    line = lines.getvalue().rstrip()

    assert line.endswith('INFO  frontend dynamo.x: worker joined name="a b" n=3 request_id=r-1')
    assert line[10] == "T"
    assert line[23] == "Z"


def test_a_json_line_is_one_object(lines: io.StringIO) -> None:
    logs.configure_logging("info", "json", "worker", lines)
    try:
        int("bad\nthing")
    except ValueError:
        logging.getLogger("dynamo.y").exception("failed", extra={"fields": {"where": {"a": 1}}})

    line = json.loads(lines.getvalue())

    assert line["component"] == "worker"
    assert line["level"] == "error"
    assert line["message"] == "failed"
    assert line["where"] == {"a": 1}
    assert "ValueError: invalid literal" in line["trace"]


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_credentials_in_urls_are_redacted(fmt: str, lines: io.StringIO) -> None:
    logs.configure_logging("info", fmt, "worker", lines)
    try:
        int("nats://u:p@host")
    except ValueError:
        fields = {"fields": {"server": "nats://u:p@host", "all": ["etcd://u:p@a"]}}
        logging.getLogger("dynamo.y").exception("no nats://u:p@host", extra=fields)

    assert "u:p" not in lines.getvalue()
    assert lines.getvalue().count("***@") >= 4


def test_set_levels_replaces_all_levels(lines: io.StringIO) -> None:
    logs.configure_logging("warn,dynamo.a=debug", "text", "c", lines)
    logging.getLogger("dynamo.a.b").debug("seen one")
    logging.getLogger("dynamo.z").info("unseen")
    logs.set_levels("warn,dynamo.z=info")
    logging.getLogger("dynamo.a.b").debug("unseen")
    logging.getLogger("dynamo.z").info("seen two")

    assert [line.rsplit(": ")[-1] for line in lines.getvalue().splitlines()] == [
        "seen one",
        "seen two",
    ]


def test_a_closed_stderr_raises_nothing(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", lines)
    logs.configure_logging("info", "text", "c")
    lines.close()

    logging.getLogger("dynamo").error("unheard")


HOSTILE = "a\x1b[2J\x07\nb\r\t\x9b31m\x85\u2028\u202e\ud800\x00"
ESCAPED = r"a\x1b[2J\x07\nb\r\t\x9b31m\x85\u2028\u202e\ud800\x00"


def test_text_lines_show_what_is_not_printable_as_escapes(lines: io.StringIO) -> None:
    logs.configure_logging("info", "text", "c", lines)
    fields = {"path": HOSTILE, "quote": 'x" y\\'}
    logging.getLogger("dynamo.x").info("message %s", HOSTILE, extra={"fields": fields})

    line = lines.getvalue()

    assert line[-1] == "\n"
    assert line[:-1].isprintable()
    assert rf'message {ESCAPED} path="{ESCAPED}" quote="x\" y\\"' in line


def test_a_traceback_keeps_its_lines_and_forges_none(lines: io.StringIO) -> None:
    def fail() -> None:
        raise ValueError(f"bad {HOSTILE}\n2026-01-01T00:00:00.000Z INFO  c forged")

    logs.configure_logging("info", "text", "c", lines)
    try:
        fail()
    except ValueError:
        logging.getLogger("dynamo.x").exception("failed")

    first, *trace = lines.getvalue().splitlines()

    assert first.endswith("failed")
    assert trace[0] == "  Traceback (most recent call last):"
    assert trace[-1] == "  2026-01-01T00:00:00.000Z INFO  c forged"
    assert all(line.isprintable() and line.startswith("  ") for line in trace)


def test_json_lines_are_valid_and_printable(lines: io.StringIO) -> None:
    logs.configure_logging("info", "json", "c", lines)
    printable = HOSTILE.replace("\ud800", "é")
    logging.getLogger("dynamo.x").info(printable, extra={"fields": {"path": printable}})
    logging.getLogger("dynamo.x").info(HOSTILE, extra={"fields": {"path": HOSTILE, "n": 1}})

    first, second = lines.getvalue().split("\n")[:2]

    assert (first + second).isprintable()
    assert json.loads(first)["message"] == json.loads(first)["path"] == printable
    assert json.loads(second)["message"] == ESCAPED
    assert json.loads(second)["n"] == "1"


def test_equal_warnings_are_one_line_and_a_count(lines: io.StringIO) -> None:
    logs.configure_logging("info", "text", "w", lines)
    (handler,) = logging.getLogger().handlers

    def emit(level: int, text: str, at_s: float, **fields: object) -> None:
        record = logging.LogRecord("dynamo.x", level, "", 0, text, None, None)
        record.fields = fields
        record.created = at_s
        handler.emit(record)

    for number in range(4):
        emit(logging.WARNING, "away", 100.0 + number, plane="events")
        emit(logging.INFO, "request", 100.0 + number)
    emit(logging.WARNING, "away", 104.0, plane="requests")
    emit(logging.INFO, "later", 100.0 + logs.FOLD_S)
    emit(logging.WARNING, "away", 101.0 + logs.FOLD_S, plane="events")

    texts = [line.partition("dynamo.x: ")[2] for line in lines.getvalue().splitlines()]
    assert texts.count("request") == 4
    assert [text for text in texts if text.startswith("away")] == [
        "away plane=events",
        "away plane=requests",
        "away plane=events repeated=3",
        "away plane=events",
    ]
    assert list(logs.last_lines)[-1].endswith("away plane=events")


def test_repeats_are_told_although_no_other_line_follows(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[tuple[float, Callable[[], None]]] = []

    def start(seconds: float, tell: Callable[[], None]) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: timers.append((seconds, tell)))

    monkeypatch.setattr(threading, "Timer", start)
    logs.configure_logging("info", "json", "w", lines)
    for _ in range(3):
        logging.getLogger("dynamo.x").error("failed")
    assert len(lines.getvalue().splitlines()) == 1
    ((seconds, tell),) = timers
    later = time.time() + seconds
    monkeypatch.setattr(time, "time", lambda: later)
    tell()
    assert [json.loads(line).get("repeated") for line in lines.getvalue().splitlines()] == [None, 2]


def test_the_last_repeats_are_told_at_the_end(lines: io.StringIO) -> None:
    logs.configure_logging("info", "json", "w", lines)
    for _ in range(3):
        logging.getLogger("dynamo.x").error("failed")
    logging.getLogger().handlers[0].close()
    assert [json.loads(line).get("repeated") for line in lines.getvalue().splitlines()] == [None, 2]
