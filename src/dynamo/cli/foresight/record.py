"""`dynamo record`: show the record of a deployment's requests, or write it as a trace."""

from __future__ import annotations

import argparse
import gzip
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.cli.parsing import Flag, Parser, check_writable, format_table, write_file
from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.operations.bench.traces import Record
    from dynamo.scheduling.request_record import RequestRecord

EXAMPLES = """\
  dynamo record show
  dynamo record show http-8000 --json
  dynamo record export http-8000 --out monday.jsonl.gz
  dynamo record export --sessions --out conversations.jsonl"""
FLAGS: Mapping[str, Sequence[Flag]] = {
    "show": (Flag("--json", "print JSON", False),),
    "export": (
        Flag("--out", "file to write, .jsonl or .jsonl.gz", metavar="FILE"),
        Flag(
            "--sessions",
            "let the requests of a session follow each other: each is sent its recorded pause "
            "after the answer before, not at its recorded time",
            False,
        ),
    ),
}
RECORD_HINT = "name a deployment or the folder of a record; record.enabled must be on"


def parser() -> Parser:
    """Return the parser: what to do, and with which record."""
    parser = Parser(
        "dynamo record",
        "Show the record of a deployment's requests, or write it as a trace for `dynamo replay`, "
        "`calibrate` and `bench`.\nThe record has arrival, lengths, times, worker and end of each "
        "request, and no words.",
        EXAMPLES,
        usage="show|export [DEPLOYMENT|FOLDER] [FLAGS]",
    )
    parser.add_argument("action", choices=("show", "export"), help="what to do")
    parser.add_argument(
        "record",
        nargs="?",
        default="",
        metavar="DEPLOYMENT|FOLDER",
        help="default: the record that was written last",
    )
    parser.add_flags(FLAGS)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Show or export a record."""
    args = parser().parse(arguments)
    return ACTIONS[args.action](args, locate_record(args.record))


def locate_record(name: str) -> str:
    """Return the folder of a record. `name`: a deployment, its port, or the folder; "": the record
    that was written last. Raises `ConfigError`."""
    from dynamo.services.planning.record import find_record

    if name and Path(name).is_dir():
        return name
    folder = find_record(name)
    if folder is None:
        what = f"no record of a deployment {name!r}" if name else "no deployment has a record"
        raise ConfigError(what, hint=RECORD_HINT)
    return str(folder)


def _show(args: argparse.Namespace, folder: str) -> int:
    record = _read(folder)
    summary = summarize_record(record)
    if args.json:
        print(msgspec.json.encode({"folder": folder, **summary}).decode())
        return 0
    print(folder)
    rows = [(name, _format(value)) for name, value in summary.items() if value not in (0, {}, None)]
    print("\n".join(format_table(rows)))
    return 0


def _export(args: argparse.Namespace, folder: str) -> int:
    if not args.out:
        raise ConfigError("export needs --out FILE", hint="--out - prints the rows")
    check_writable(args.out)
    record = _read(folder)
    rows = list(_session_rows(record.rows) if args.sessions else _trace_rows(record.rows))
    data = msgspec.json.Encoder().encode_lines(rows)
    write_file(args.out, gzip.compress(data) if args.out.endswith(".gz") else data)
    lost = f"; {record.damaged} damaged lines are left out" if record.damaged else ""
    if args.out != "-":
        print(f"{len(rows)} requests in {args.out}{lost}")
    return 0


def _read(folder: str) -> Record[RequestRecord]:
    from dynamo.operations.bench.traces import read_record
    from dynamo.scheduling.request_record import RequestRecord

    record = read_record(folder, RequestRecord)
    if not record.rows:
        raise ConfigError(f"{folder}: no requests", hint=RECORD_HINT)
    return record


def summarize_record(record: Record[RequestRecord]) -> Mapping[str, Any]:
    """Return what a record says, by name; times in milliseconds."""
    from dynamo.operations.latency_summary import summarize_latencies

    rows = record.rows
    seconds = max((rows[-1].timestamp - rows[0].timestamp) / 1e3, 1e-3)
    whole = [row for row in rows if not row.end]
    prompts = sum(row.input_length for row in rows)

    def latency(times: Sequence[float]) -> Mapping[str, float]:
        summary = summarize_latencies([each / 1e3 for each in times])
        return {"mean": summary.mean, "p50": summary.p50, "p99": summary.p99}

    return {
        "requests": len(rows),
        "damaged_lines": record.damaged,
        "from": datetime.fromtimestamp(rows[0].timestamp / 1e3, UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "requests_per_s": round(len(rows) / seconds, 3),
        "ends": dict(Counter(row.end or "complete" for row in rows)),
        "moved": sum(row.moves > 0 for row in rows),
        "input_tokens": round(prompts / len(rows), 1),
        "output_tokens": round(sum(row.output_length for row in rows) / len(rows), 1),
        "cached_share": round(sum(row.cached_tokens for row in rows) / max(1, prompts), 4),
        "workers": dict(Counter(row.worker for row in rows if row.worker)),
        "ttft_ms": latency([row.ttft_ms for row in whole if row.ttft_ms is not None]),
        "e2e_ms": latency([row.e2e_ms for row in whole]),
    }


def _trace_rows(rows: Sequence[RequestRecord]) -> Iterator[Mapping[str, Any]]:
    begin_ms = rows[0].timestamp
    for row in rows:
        yield msgspec.to_builtins(row) | {"timestamp": round(row.timestamp - begin_ms, 1)}


def _session_rows(rows: Sequence[RequestRecord]) -> Iterator[Mapping[str, Any]]:
    """Yield rows whose sessions are sequences. A request that was sent before the answer to the one
    before it begins a session of its own."""
    ends_ms: dict[str, float] = {}
    parts: Counter[str] = Counter()
    for row, fields in zip(rows, _trace_rows(rows), strict=True):
        if not row.session:
            yield fields
            continue
        delay_ms = row.timestamp - ends_ms.get(row.session, row.timestamp)
        if delay_ms < 0:
            parts[row.session] += 1
            delay_ms = 0.0
        ends_ms[row.session] = row.timestamp + row.e2e_ms
        session = f"{row.session}.{parts[row.session]}"
        yield {**fields, "session_id": session, "delay": round(delay_ms, 1)}


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(each)}" for name, each in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


ACTIONS: Mapping[str, Callable[[argparse.Namespace, str], int]] = {
    "show": _show,
    "export": _export,
}
