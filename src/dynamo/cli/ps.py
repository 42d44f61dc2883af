"""`dynamo ps`: list the live processes of this user's deployments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser, format_table
from dynamo.core.host.pids import age_s

if TYPE_CHECKING:
    from dynamo.runtime.deployment import ProcessRecord

COLUMNS = (
    "deployment", "namespace", "role", "name", "instance", "pid", "address", "status_url", "state",
    "restarts", "age", "load", "model", "engine", "cards",
)  # fmt: skip
KEYS = (*COLUMNS, "reason", "shared_bytes")

EXAMPLES = """\
  dynamo ps
  dynamo ps --json"""


def parser() -> Parser:
    """Return the parser: `--json`."""
    parser = Parser("dynamo ps", "List the live processes of all your deployments.", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print a table or JSON."""
    args = parser().parse(arguments)

    from dynamo.operations.running import read_processes
    from dynamo.runtime.deployment import add_waiting_children, live_processes

    records = add_waiting_children(live_processes())
    answering = [record for record in records if record.state != "hung"]
    loads = {
        reading.record.instance: reading.load
        for reading in read_processes(answering, health=False)
        if reading.load is not None
    }
    if args.json:
        print(format_processes_json(records, loads))
    elif records:
        print(format_processes_table(records, loads))
    else:
        print("no deployment is running; start one with `dynamo run`")
    return 0


Loads = Mapping[str, tuple[int, int]]
"""The requests that each instance works on, and those that wait there."""
NO_LOADS: Loads = {}


def format_processes_json(records: Sequence[ProcessRecord], loads: Loads) -> str:
    """Return a JSON array of objects with the `KEYS`. `age` is in seconds, `load` the requests that
    the process works on and those that wait there, or null."""
    rows = [
        {key: getattr(record, key, None) for key in KEYS}
        | {"age": age_s(record.start_ticks), "load": loads.get(record.instance)}
        for record in records
    ]
    return msgspec.json.encode(rows).decode()


def format_processes_table(records: Sequence[ProcessRecord], loads: Loads = NO_LOADS) -> str:
    """Return a table with a row for each process, and lines that say why some do not serve, and
    what the workers of a deployment share. Addresses lack the incarnation of the process. The load
    is `running+waiting`."""
    lines = format_table([tuple(key.upper() for key in COLUMNS), *_cells(records, loads)])
    reasons = [f"{record.name}: {record.reason}" for record in records if record.reason]
    reasons += [
        f"{record.deployment}: its workers share {record.shared_bytes / 1e6:.0f} MB of weights"
        for record in records
        if record.shared_bytes
    ]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _cells(records: Sequence[ProcessRecord], loads: Loads) -> Iterator[tuple[str, ...]]:
    for record in records:
        load = loads.get(record.instance)
        shown = {
            "address": _without_incarnation(record.address),
            "age": format_age(age_s(record.start_ticks)),
            "load": "" if load is None else f"{load[0]}+{load[1]}",
        }
        yield tuple(shown.get(key, str(getattr(record, key, ""))) for key in COLUMNS)


def format_age(seconds: float) -> str:
    """Return an age as kubectl shows it: `42s`, `17m`, `5h`, `3d`; "" for 0."""
    for unit, length_s in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length_s:
            return f"{int(seconds / length_s)}{unit}"
    return f"{int(seconds)}s" if seconds else ""


def _without_incarnation(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if scheme == "tcp" else address
