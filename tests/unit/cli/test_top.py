"""Frames of `dynamo top`, its keys, and what it reads."""

from __future__ import annotations

import curses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from tests.unit.observer.stories import make_story

from dynamo.cli.observer.top.command import format_once, run
from dynamo.cli.observer.top.frame import View, fit_columns, make_frame, sparkline
from dynamo.cli.observer.top.screen import TopScreen, read_key
from dynamo.cli.observer.top.state import TopReader, TopState, WorkerRow
from dynamo.core.clock import SystemClock
from dynamo.core.errors import ConfigError, ModelNotReady
from dynamo.core.values import Load, TierLoad
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.telemetry.slo import FAILED
from dynamo.telemetry.story import StoryBatch


class FakeClient:
    """Answers with the activity of an observer, as an HTTP client reads it."""

    def __init__(self, observer: DeploymentObserver) -> None:
        self._observer = observer
        self.error: Exception | None = None

    def activity(self, seconds: int) -> Any:
        if self.error is not None:
            raise self.error
        return msgspec.json.decode(msgspec.json.encode(self._observer.show_activity(seconds)))

    def find_stories(self, name: str) -> Any:
        return msgspec.json.decode(msgspec.json.encode(self._observer.find(name)))


def make_reader() -> tuple[Any, FakeClient]:
    clock = SystemClock()
    observer, now = DeploymentObserver(clock), clock.wall()
    failed = make_story(
        request_id="bad-1", client_id="evil\x1b[2J", end="worker_failed", slo=FAILED, wall_s=now - 4
    )
    stories = [
        make_story(request_id=f"r-{n}", client_id=f"r-{n}", wall_s=now - 3) for n in range(9)
    ]
    observer.on_batch(StoryBatch("frontend-1", now, [*stories, failed]))
    tiers = (TierLoad("host", 0.1, 0.0, 30, 40),)
    observer.sample(
        {
            "worker-1-0123456789": Load(
                running=3, waiting=2, active_blocks=50, total_blocks=200, cached_blocks=100,
                tiers=tiers,
            ),
            "worker-2-0123456789": Load(running=1, total_blocks=200),
        }
    )  # fmt: skip
    client = FakeClient(observer)
    reader: Any = TopReader(client, None)  # type: ignore[arg-type] # as little as it needs
    return reader, client


def texts(
    state: TopState, view: View | None = None, width: int = 80, height: int = 24
) -> list[str]:
    lines = make_frame(state, view or View(), width, height)
    assert len(lines) == height
    assert all(len(line.text) <= width for line in lines)
    return [line.text for line in lines]


def test_a_frame_shows_workers_pace_and_slow_requests() -> None:
    reader, _ = make_reader()
    state = reader.read()
    shown = "\n".join(texts(state))
    assert "2 workers" in shown
    assert "4 running, 2 waiting" in shown
    assert "1 failed" in shown
    assert "median 51 ms" in shown
    (row,) = (line for line in texts(state, width=200) if line.startswith("worker-1"))
    assert row.split()[:5] == ["worker-1", "-", "3+2", "25%", "50%"]
    assert "host 75%" in row
    assert "\x1b" not in shown
    assert "evil\\x1b[2J" in shown
    assert texts(state, View(cursor=2))[-2].startswith("")


def test_the_last_state_stays_with_the_reason_why_nothing_is_newer() -> None:
    reader, client = make_reader()
    reader.read()
    client.error = ModelNotReady("nobody listens\x07")
    state = reader.read()
    shown = texts(state)
    assert "2 workers" in shown[0]
    assert shown[-1] == "not current: nobody listens\\x07"


def test_alerts_name_their_subject_if_they_have_one() -> None:
    alerts = [
        {"name": "WorkerLost", "about": "worker-2", "message": "Requests move."},
        {"name": "failures", "message": "Routing could be better."},
    ]
    shown = texts(msgspec.structs.replace(many_workers(1), alerts=alerts))
    assert "! WorkerLost worker-2: Requests move." in [line.strip() for line in shown]
    assert "! failures: Routing could be better." in [line.strip() for line in shown]


def many_workers(count: int) -> TopState:
    rows = [
        WorkerRow(
            name=f"worker-{number}", instance=f"worker-{number}-0123456789", state="ready",
            running=number, resident_bytes=number << 20, age_s=1_000 - number, loads=[number] * 60,
        )
        for number in range(count)
    ]  # fmt: skip
    slow = [
        {"at": 1.0, "seconds": 2.0, "client_id": f"r-{n}", "request_id": f"r-{n}", "end": "",
         "worker": "worker-3-0123456789", "verdict": "slow"}
        for n in range(20)
    ]  # fmt: skip
    return TopState(deployment="http-8000", workers=rows, slow=slow, at=1.0)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (20, 5), (1, 1), (300, 100)])
def test_frames_fit_terminals_and_the_cursor_is_on_them(width: int, height: int) -> None:
    state = many_workers(64)
    for cursor in (0, 40, 63, 64, 83):
        lines = make_frame(state, View(cursor=cursor), width, height)
        assert len(lines) == height
        assert all(len(line.text) <= width for line in lines)
        if height >= 24:
            assert [line.style for line in lines].count("selected") == 1


def test_narrow_terminals_drop_columns_in_a_written_order() -> None:
    titles = [[column.title for column in fit_columns(width)] for width in (200, 80, 40, 22)]
    assert titles[0][-1] == "MODEL"
    assert titles[1][-1] == "LAST 16 S"
    assert titles[2] == ["NAME", "STATE", "LOAD", "KV"]
    assert titles[3] == ["NAME", "LOAD"]


def test_bars_are_as_high_as_the_largest_value() -> None:
    assert sparkline([0, 1, 4, 8, None], 6) == "  ▁▄█ "
    assert sparkline([0.0, 0.0], 4) == "    "
    assert len(sparkline([], 5)) == 5


def make_screen(state: TopState) -> TopScreen:
    reader, _ = make_reader()
    screen = TopScreen(reader, 1.0)
    screen.state = state
    return screen


def press(screen: TopScreen, *keys: str) -> bool:
    stays = [screen.press(key) for key in keys]
    return all(stays)


def first_worker(screen: TopScreen) -> str:
    lines = texts(screen.state, screen.view)
    at = next(number for number, line in enumerate(lines) if line.startswith("NAME"))
    return lines[at + 1].split()[0]


def test_keys_sort_filter_and_move() -> None:
    screen = make_screen(many_workers(20))
    assert first_worker(screen) == "worker-19"
    press(screen, "T")
    assert first_worker(screen) == "worker-0"
    press(screen, "M")
    assert first_worker(screen) == "worker-19"
    press(screen, "P", ">", "s")
    assert screen.view.order == "CACHED"
    press(screen, "/", *"r-7", "enter")
    assert first_worker(screen) == "worker-7"
    assert press(screen, "escape")
    assert screen.view.filter == ""
    press(screen, "end", "page up", "up", "k", "j", "down", "home")
    assert screen.view.cursor == 0
    assert press(screen, "?")
    assert "chosen" not in texts(screen.state, screen.view)[0]
    assert any("drain the worker" in line for line in texts(screen.state, screen.view))
    assert press(screen, "q")
    assert not screen.press("q")


class TypedKeys:
    """A window of curses in which characters were typed."""

    def __init__(self, text: str) -> None:
        self.rest = list(text)

    def get_wch(self) -> str:
        if not self.rest:
            raise curses.error("no input")
        return self.rest.pop(0)

    def timeout(self, _: int) -> None:
        pass


class SmallWindow(TypedKeys):
    """A window that keeps the frames that it has shown."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.frames: list[list[str]] = []

    def getmaxyx(self) -> tuple[int, int]:
        return 24, 80

    def erase(self) -> None:
        self.frames.append([])

    def addstr(self, _row: int, _column: int, text: str, _style: int) -> None:
        self.frames[-1].append(text)

    def refresh(self) -> None:
        pass


def test_the_first_frame_has_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, client = make_reader()
    read = client.activity

    def read_slowly(seconds: int) -> Any:
        time.sleep(0.02)
        return read(seconds)

    window = SmallWindow("q")
    monkeypatch.setattr(client, "activity", read_slowly)
    monkeypatch.setattr(curses, "wrapper", lambda show: show(window))
    monkeypatch.setattr(curses, "has_colors", lambda: False)
    monkeypatch.setattr(curses, "curs_set", lambda _: None)
    TopScreen(reader, 1.0).run()
    (frame,) = window.frames
    assert any(line.startswith("worker-2") for line in frame)


def test_the_bytes_of_an_unknown_key_are_not_an_escape() -> None:
    assert [read_key(TypedKeys(text)) for text in ("\x1b", "", "\n", "q")] == [
        *("escape", "", "enter", "q")
    ]
    assert read_key(TypedKeys("\x1b[27;5;9~")) == ""


def test_a_worker_is_drained_only_after_a_yes() -> None:
    screen, drained = make_screen(many_workers(3)), []
    screen._reader.drain = lambda name, _: drained.append(name)  # type: ignore[method-assign]
    press(screen, "d")
    assert texts(screen.state, screen.view)[-1].startswith("drain worker-2?")
    press(screen, "q")
    assert "nothing was done" in texts(screen.state, screen.view)[-1]
    press(screen, "d")
    screen.state = many_workers(9)  # another worker is first now
    press(screen, "y")
    screen._work.shutdown()
    assert drained == ["worker-2"]


def test_enter_looks_into_a_worker_and_a_request() -> None:
    reader, _ = make_reader()
    screen = TopScreen(reader, 1.0)
    screen.state = reader.read()
    press(screen, "enter")
    shown = texts(screen.state, screen.view)
    assert shown[0] == "worker worker-1"
    assert any("host 30 of 40 blocks" in line for line in shown)
    press(screen, "q", "end", "enter")
    screen._work.shutdown()
    shown = texts(screen.state, screen.view)
    assert shown[0].startswith("request r-")
    assert any("STAGE" in line for line in shown)


def test_json_and_one_frame_have_every_worker() -> None:
    state = many_workers(64)
    assert sum(line.startswith("worker-") for line in format_once(state).splitlines()) == 64
    decoded: Mapping[str, Sequence[Any]] = json.loads(msgspec.json.encode(state))
    assert len(decoded["workers"]) == 64


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "soon"])
def test_wrong_intervals_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--interval"):
        run(["--once", "--interval", text])
