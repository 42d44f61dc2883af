"""Frames of `dynamo top`: lines of text with a style, without a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from dynamo.cli.observer.top.state import TopState, WorkerRow
from dynamo.cli.ps import format_age

Style = Literal["", "title", "head", "bad", "selected", "dim"]
BARS = " ▁▂▃▄▅▆▇█"
MIN_SLOW_ROWS = 6
"""The table of slow requests has a third of the screen, and so many lines at least."""
HELP = (
    ("up, down, k, j, PgUp, PgDn", "choose a worker or a request"),
    ("Enter", "look into it"),
    ("l", "the last log lines of the worker"),
    ("w", "why the request was slow"),
    ("d", "drain the worker, after a question"),
    ("/ or F4", "show only names with a text; Esc ends that"),
    ("s, > or F6", "sort by the next column"),
    ("P, M, T", "sort by load, memory, age"),
    ("space", "pause"),
    ("? or F1", "this page"),
    ("q, Esc or F10", "back, and out"),
)


class Line(NamedTuple):
    """A line of a frame."""

    text: str
    style: Style = ""


class WorkerColumn(NamedTuple):
    """A column of workers. `sort` returns a key; the largest comes first, except for names."""

    title: str
    width: int
    show: Callable[[WorkerRow], str]
    sort: Callable[[WorkerRow], Any] | None = None


class View(msgspec.Struct):
    """The choices of the user. `page`: "main", "help", or the title of `lines`. `order`: the title
    of the column that sorts. `cursor` counts workers, then slow requests. `question` waits for y,
    and is about the process `subject`."""

    page: str = "main"
    order: str = "LOAD"
    filter: str = ""
    typing: bool = False
    cursor: int = 0
    scroll: int = 0
    paused: bool = False
    message: str = ""
    question: str = ""
    subject: str = ""
    lines: Sequence[str] = ()


def _share(ratio: float) -> str:
    return f"{ratio * 100:.0f}%"


def _size(value: float) -> str:
    for unit in ("", "K", "M", "G"):
        if value < 1024 or unit == "G":
            return f"{value:.0f}{unit}" if value < 10 * 1024 or unit == "G" else ""
        value /= 1024
    return ""


def _tiers(row: WorkerRow) -> str:
    return " ".join(
        f"{name} {_share(blocks / room if room else 0.0)}"
        for name, (blocks, room) in row.tiers.items()
    )


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the last `width` values as bars, as high as the largest of them."""
    shown = [value or 0.0 for value in values[-width:]]
    top = max(shown, default=0.0) or 1.0
    bars = (BARS[min(8, int(value / top * 8 + 0.999))] if value > 0 else " " for value in shown)
    return "".join(bars).rjust(width)


COLUMNS = (
    WorkerColumn("NAME", 13, lambda row: row.name, lambda row: row.name),
    WorkerColumn("STATE", 10, lambda row: row.state or "-", lambda row: row.state),
    WorkerColumn("LOAD", 6, lambda row: f"{row.running}+{row.waiting}", lambda row: row.load),
    WorkerColumn("KV", 4, lambda row: _share(row.active_ratio), lambda row: row.active_ratio),
    WorkerColumn("CACHED", 6, lambda row: _share(row.cached_ratio), lambda row: row.cached_ratio),
    WorkerColumn(
        "PREFILL", 7, lambda row: _size(row.prefill_tokens), lambda row: row.prefill_tokens
    ),
    WorkerColumn("MEM", 5, lambda row: _size(row.resident_bytes), lambda row: row.resident_bytes),
    WorkerColumn("AGE", 4, lambda row: format_age(row.age_s), lambda row: row.age_s),
    WorkerColumn("LAST 16 S", 16, lambda row: sparkline(row.loads, 16)),
    WorkerColumn("TIERS", 20, _tiers),
    WorkerColumn("MODEL", 24, lambda row: row.model, lambda row: row.model),
)
DROPPED = ("MODEL", "TIERS", "LAST 16 S", "PREFILL", "CACHED", "AGE", "MEM", "STATE", "KV")
"""The order in which a narrow terminal drops columns."""
SORTED = [column.title for column in COLUMNS if column.sort is not None]


def fit_columns(width: int) -> Sequence[WorkerColumn]:
    """Return the columns for which a terminal has room. NAME and LOAD stay."""
    columns = list(COLUMNS)
    for title in DROPPED:
        if sum(column.width + 1 for column in columns) <= width:
            break
        columns = [column for column in columns if column.title != title]
    return columns


def chosen_workers(state: TopState, view: View) -> Sequence[WorkerRow]:
    """Return the workers that pass the filter, in order."""
    rows = [row for row in state.workers if _passes(view, row.name, row.instance, row.model)]
    column = next(column for column in COLUMNS if column.title == view.order)
    key = column.sort or (lambda row: row.name)
    rows.sort(key=lambda row: row.name)
    return sorted(rows, key=key, reverse=view.order != "NAME")


def chosen_requests(state: TopState, view: View) -> Sequence[Mapping[str, Any]]:
    """Return the slow requests that pass the filter."""
    return [
        row
        for row in state.slow
        if _passes(view, row["client_id"], row["worker"], row["verdict"], row["end"])
    ]


def _passes(view: View, *texts: str) -> bool:
    return any(view.filter.lower() in text.lower() for text in texts)


def make_frame(state: TopState, view: View, width: int, height: int) -> list[Line]:
    """Return the lines of the screen, at most `height` of at most `width` characters."""
    if view.page == "main":
        lines = _main_page(state, view, width, height)
    elif view.page == "help":
        lines = [Line("dynamo top", "title"), Line("")]
        lines += [Line(f"{keys:<28} {text}") for keys, text in HELP]
    else:
        rows = view.lines[view.scroll :]
        lines = [Line(view.page, "title"), *(Line(text) for text in rows)]
    lines = lines[: height - 1]
    lines += [Line("")] * (height - 1 - len(lines))
    return [Line(text[:width], style) for text, style in (*lines, _last_line(state, view))]


def _last_line(state: TopState, view: View) -> Line:
    if view.question:
        return Line(view.question, "bad")
    if view.typing:
        return Line(f"filter: {view.filter}_", "title")
    if view.message:
        return Line(view.message, "title")
    if state.reason:
        return Line(f"not current: {state.reason}", "bad")
    hint = "?help /filter s:sort Enter:look l:logs w:why d:drain space:pause q:quit"
    return Line(f"PAUSED  {hint}" if view.paused else hint, "dim")


def _main_page(state: TopState, view: View, width: int, height: int) -> list[Line]:
    lines = [*_header(state, width), *_alert_lines(state)]
    workers, requests = chosen_workers(state, view), chosen_requests(state, view)
    room = height - 1 - len(lines)
    slow_rows = min(len(requests) + 2, max(MIN_SLOW_ROWS, room // 3)) if requests else 0
    worker_rows = max(1, room - slow_rows - 1)
    columns = fit_columns(width)
    titles = (_mark(column.title, view).ljust(column.width) for column in columns)
    lines.append(Line(" ".join(titles), "head"))
    first = max(0, min(view.cursor, len(workers) - 1) - worker_rows + 1)
    for number, row in enumerate(workers[first : first + worker_rows], first):
        cells = (column.show(row)[: column.width].ljust(column.width) for column in columns)
        style: Style = "bad" if row.state not in ("", "ready", "starting") else ""
        lines.append(Line(" ".join(cells), "selected" if number == view.cursor else style))
    if not workers:
        lines.append(Line("no worker has this name" if view.filter else "no worker serves", "dim"))
    if not requests:
        return lines
    lines += [Line(""), Line("SLOWEST AND FAILED REQUESTS OF THE LAST 5 MINUTES", "head")]
    first = max(0, view.cursor - len(workers) - slow_rows + 3)
    for number, request in enumerate(requests[first : first + slow_rows - 2], first):
        at = time.strftime("%H:%M:%S", time.localtime(request["at"]))
        text = f"{at} {request['seconds']:6.2f} s  {request['client_id'][:24]:<24} "
        text += f"{request['end'] or 'ok':<8} {request['verdict']}"
        is_chosen = number + len(workers) == view.cursor
        lines.append(Line(text, "selected" if is_chosen else "bad" if request["end"] else ""))
    return lines


def _mark(title: str, view: View) -> str:
    return f"{title}*" if title == view.order else title


def _header(state: TopState, width: int) -> list[Line]:
    pace, bars = state.pace, max(10, min(60, width - 42))
    running = sum(row.running for row in state.workers)
    waiting = state.waiting + sum(row.waiting for row in state.workers)
    requests, failed = pace.get("requests", ()), sum(pace.get("failed", ()))
    rate = sum(requests[-10:]) / 10
    tokens = sum(pace.get("tokens", ())[-10:]) / 10
    clock = time.strftime("%H:%M:%S", time.localtime(state.at)) if state.at else ""
    cache = [row.cached_ratio for row in state.workers]
    cached = f", cache {_share(sum(cache) / len(cache))} full" if cache else ""
    name, title = state.deployment or "dynamo", f"{len(state.workers)} workers{cached}"
    line = f"{name}  {title}  {rate:.1f} requests/s  {tokens:.0f} tokens/s  {clock}"
    loads = [row.loads for row in state.workers if row.loads]
    length = max(map(len, loads), default=0)
    sums = [sum(each[-at] for each in loads if len(each) >= at) for at in range(length, 0, -1)]
    return [
        Line(line, "title"),
        Line(f"load {sparkline(sums, bars)} {running} running, {waiting} waiting"),
        Line(f"ttft {sparkline(pace.get('ttft_p95', ()), bars)} {_latest(pace)}"),
        Line(
            f"gap  {sparkline(pace.get('gap', ()), bars)} longest "
            f"{_format_s(max((each for each in pace.get('gap', ()) if each), default=None))}, "
            f"{failed} failed",
            "bad" if failed else "",
        ),
    ]


def _latest(pace: Mapping[str, Sequence[Any]]) -> str:
    def last(name: str) -> float | None:
        return next((each for each in reversed(pace.get(name, ())) if each is not None), None)

    return f"median {_format_s(last('ttft'))}, p95 {_format_s(last('ttft_p95'))}"


def _format_s(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _alert_lines(state: TopState) -> list[Line]:
    subjects = [f"{alert['name']} {alert.get('about', '')}".strip() for alert in state.alerts[:3]]
    shown = [
        Line(f"! {subject}: {alert.get('message', '')}", "bad")
        for subject, alert in zip(subjects, state.alerts, strict=False)
    ]
    if len(state.alerts) > 3:
        shown.append(Line(f"! {len(state.alerts) - 3} more: `dynamo doctor` lists them", "bad"))
    return shown
