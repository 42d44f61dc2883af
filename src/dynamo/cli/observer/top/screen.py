"""The screen of `dynamo top`: curses, keys, and threads that read."""

from __future__ import annotations

import curses
import locale
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dynamo.cli.observer.top.frame import (
    BARS,
    SORTED,
    Line,
    View,
    chosen_requests,
    chosen_workers,
    make_frame,
)
from dynamo.cli.observer.top.state import TopReader, TopState, WorkerRow
from dynamo.cli.ps import format_age
from dynamo.core.errors import DynamoError

KEY_WAIT_MS = 200
FIRST_WAIT_S = 0.4
"""So long the first frame waits for the deployment's answer."""
PAGE_LINES = 10
ESCAPE_DELAY_MS = 25
ASCII_BARS = " .:-=+*#@"
ORDER_BY_KEY = {"P": "LOAD", "M": "MEM", "T": "AGE"}
NAMES: Mapping[int, str] = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_PPAGE: "page up",
    curses.KEY_NPAGE: "page down",
    curses.KEY_HOME: "home",
    curses.KEY_END: "end",
    curses.KEY_ENTER: "enter",
    curses.KEY_BACKSPACE: "delete",
    curses.KEY_F1: "?",
    curses.KEY_F4: "/",
    curses.KEY_F6: "s",
    curses.KEY_F10: "q",
    curses.KEY_RESIZE: "resize",
}
CHARACTERS = {"\n": "enter", "\r": "enter", "\x1b": "escape", "\x7f": "delete", "\b": "delete"}


class TopScreen:
    """Shows a deployment until the user leaves. Reading never delays a key."""

    def __init__(self, reader: TopReader, interval_s: float) -> None:
        self._reader, self._interval_s = reader, interval_s
        self.state, self.view = reader.last, View()
        self._changed, self._ended = threading.Event(), threading.Event()
        self._work = ThreadPoolExecutor(1, "top")
        self._pending: Future[None] | None = None
        self._moves: Mapping[str, int] = {
            "up": -1, "k": -1, "down": 1, "j": 1, "page up": -PAGE_LINES, "page down": PAGE_LINES,
            "home": -(1 << 30), "end": 1 << 30,
        }  # fmt: skip
        self._actions: Mapping[str, Callable[[], None]] = {
            "enter": self._look,
            "w": self._look,
            "l": self._show_logs,
            "d": self._ask_to_drain,
            "s": self._sort_by_next,
            ">": self._sort_by_next,
            "/": self._begin_filter,
            " ": self._pause,
            "?": lambda: self._open_page("help", ()),
        }

    def run(self) -> None:
        """Show until the user leaves. The terminal is as before afterwards."""
        locale.setlocale(locale.LC_ALL, "")
        os.environ.setdefault("ESCDELAY", str(ESCAPE_DELAY_MS))
        reading = threading.Thread(target=self._read_steadily, daemon=True)
        reading.start()
        try:
            curses.wrapper(self._loop)
        finally:
            self._ended.set()
            self._work.shutdown(wait=False, cancel_futures=True)

    def _read_steadily(self) -> None:
        while not self._ended.is_set():
            if not self.view.paused:
                self.state = self._reader.read()
                self._changed.set()
            self._ended.wait(self._interval_s)

    def _loop(self, screen: Any) -> None:
        styles = _make_styles()
        with suppress(curses.error):
            curses.curs_set(0)
        screen.timeout(KEY_WAIT_MS)
        self._changed.wait(FIRST_WAIT_S)
        self._changed.clear()
        self._paint(screen, styles)
        while True:
            key = read_key(screen)
            if key and not self.press(key):
                return
            if not key and not os.isatty(0):  # the terminal went away
                return
            if key or self._changed.is_set():
                self._changed.clear()
                self._paint(screen, styles)

    def _paint(self, screen: Any, styles: Mapping[str, int]) -> None:
        height, width = screen.getmaxyx()
        screen.erase()
        for row, line in enumerate(make_frame(self.state, self.view, width, height)):
            with suppress(curses.error):  # the last cell of the screen
                screen.addstr(row, 0, _encodable(line), styles[line.style])
        screen.refresh()

    def press(self, key: str) -> bool:
        """React to a key. Returns False if the user leaves."""
        view = self.view
        if view.question:
            self._answer(key)
        elif view.typing:
            self._type(key)
        elif key in ("q", "escape"):
            if view.page == "main" and not view.filter:
                return False
            if view.page == "main":
                view.filter = ""
            view.page, view.message = "main", ""
        elif key in self._moves:
            self._move(self._moves[key])
        elif key in ORDER_BY_KEY:
            view.order = ORDER_BY_KEY[key]
        elif key in self._actions:
            view.message = ""
            self._actions[key]()
        return True

    def _type(self, key: str) -> None:
        view = self.view
        if key in ("enter", "escape"):
            view.typing = False
            if key == "escape":
                view.filter = ""
        elif key == "delete":
            view.filter = view.filter[:-1]
        elif len(key) == 1 and key.isprintable():
            view.filter += key
        view.cursor = 0

    def _begin_filter(self) -> None:
        self.view.page, self.view.typing = "main", True

    def _pause(self) -> None:
        self.view.paused = not self.view.paused

    def _sort_by_next(self) -> None:
        self.view.order = SORTED[(SORTED.index(self.view.order) + 1) % len(SORTED)]

    def _move(self, lines: int) -> None:
        view = self.view
        if view.page != "main":
            view.scroll = max(0, min(len(view.lines) - 1, view.scroll + lines))
            return
        count = len(chosen_workers(self.state, view)) + len(chosen_requests(self.state, view))
        view.cursor = max(0, min(count - 1, view.cursor + lines))

    @property
    def chosen_worker(self) -> WorkerRow | None:
        """The worker at the cursor."""
        workers = chosen_workers(self.state, self.view)
        return workers[self.view.cursor] if self.view.cursor < len(workers) else None

    def _chosen_request(self) -> Mapping[str, Any] | None:
        at = self.view.cursor - len(chosen_workers(self.state, self.view))
        requests = chosen_requests(self.state, self.view)
        return requests[at] if 0 <= at < len(requests) else None

    def _look(self) -> None:
        request = self._chosen_request()
        if request is not None:
            name, own_id = request["client_id"], request["request_id"]
            self._in_background(f"request {name}", lambda: self._reader.find_request(own_id))
        elif (worker := self.chosen_worker) is not None:
            self._open_page(f"worker {worker.name}", describe_worker(worker, self.state))

    def _show_logs(self) -> None:
        request, worker = self._chosen_request(), self.chosen_worker
        instance = request["worker"] if request is not None else worker and worker.instance
        known = next((row for row in self.state.workers if row.instance == instance), None)
        if known is not None:
            name = known.name
            self._in_background(f"logs of {name}", lambda: self._reader.read_logs(name))

    def _ask_to_drain(self) -> None:
        if (worker := self.chosen_worker) is not None:
            self.view.subject = worker.name
            self.view.question = f"drain {worker.name}? Its requests move to others. y or n"

    def _answer(self, key: str) -> None:
        view, name = self.view, self.view.subject
        view.question = view.subject = ""
        if key not in ("y", "Y"):
            view.message = "nothing was done"
            return
        view.message = f"{name} drains"

        def drain() -> Sequence[str]:
            self._reader.drain(name, self._tell)
            return ()

        self._in_background("", drain)

    def _tell(self, message: str) -> None:
        self.view.message = message
        self._changed.set()

    def _in_background(self, title: str, read: Callable[[], Sequence[str]]) -> None:
        """Open a page once its lines are read."""

        def work() -> None:
            try:
                lines = read()
            except (DynamoError, OSError) as error:
                self._tell(str(error) or "the deployment does not answer")
            else:
                if title:
                    self._open_page(title, lines)
            self._changed.set()

        self._work.submit(work)

    def _open_page(self, title: str, lines: Sequence[str]) -> None:
        self.view.page, self.view.lines, self.view.message = title, lines, ""
        self.view.scroll = max(0, len(lines) - PAGE_LINES) if title.startswith("logs") else 0


def describe_worker(worker: WorkerRow, state: TopState) -> Sequence[str]:
    """Return what is known of a worker as lines."""
    tiers = [f"{name} {blocks} of {room} blocks" for name, (blocks, room) in worker.tiers.items()]
    memory, prompts = f"{worker.resident_bytes / 1e6:.0f} MB", worker.prefill_tokens
    requests = f"{worker.running} running, {worker.waiting} waiting"
    lines = [
        f"instance   {worker.instance}",
        f"state      {worker.state or 'on another host'}, {worker.restarts} restarts",
        f"model      {worker.model or '-'}",
        f"process    {worker.pid or '-'}, age {format_age(worker.age_s) or '-'}, {memory} resident",
        f"requests   {requests}, {prompts} prompt tokens to compute",
        f"KV blocks  {worker.active_ratio:.0%} in use, {worker.cached_ratio:.0%} hold prefixes",
        f"tiers      {', '.join(tiers) or 'none'}",
        "",
        "its slow and failed requests:",
    ]
    return lines + [
        f"  {row['seconds']:.2f} s  {row['client_id']}  {row['end'] or 'ok'}  {row['verdict']}"
        for row in state.slow
        if row["worker"] == worker.instance
    ]


def read_key(screen: Any) -> str:
    """Return the name of a key, or "" if none was pressed for a while. The bytes of a key that the
    terminal's description lacks are not read as Esc and letters."""
    try:
        key = screen.get_wch()
        if key == "\x1b":
            screen.timeout(0)
            with suppress(curses.error):  # nothing follows
                screen.get_wch()
                key = ""
                curses.flushinp()
            screen.timeout(KEY_WAIT_MS)
    except (curses.error, KeyboardInterrupt) as error:
        return "" if isinstance(error, curses.error) else "q"
    if isinstance(key, int):
        return NAMES.get(key, "")
    return CHARACTERS.get(key, str(key))


def _make_styles() -> Mapping[str, int]:
    styles = {
        "": curses.A_NORMAL,
        "title": curses.A_BOLD,
        "head": curses.A_UNDERLINE,
        "bad": curses.A_BOLD,
        "selected": curses.A_REVERSE,
        "dim": curses.A_DIM,
    }
    if curses.has_colors() and not os.environ.get("NO_COLOR"):
        curses.use_default_colors()
        curses.init_pair(1, curses.COLOR_RED, -1)
        curses.init_pair(2, curses.COLOR_CYAN, -1)
        styles["bad"] = curses.color_pair(1)
        styles["title"] = curses.color_pair(2) | curses.A_BOLD
    return styles


def _encodable(line: Line) -> str:
    encoding = locale.getpreferredencoding(do_setlocale=False)
    text = line.text
    if encoding.lower().replace("-", "") != "utf8":
        text = text.translate(str.maketrans(BARS, ASCII_BARS))
    return text.encode(encoding, "replace").decode(encoding)
