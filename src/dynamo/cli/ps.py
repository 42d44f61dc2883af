"""`dynamo ps`: list the live processes of this user's deployments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dynamo.cli.parsing import Parser, format_table

if TYPE_CHECKING:
    from dynamo.runtime.deployment import ProcessRecord

COLUMNS = (
    "deployment", "namespace", "role", "name", "instance", "pid", "address", "status_url", "state",
    "restarts", "engine", "cards",
)  # fmt: skip

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

    from dynamo.runtime.deployment import add_waiting_children, live_processes

    records = add_waiting_children(live_processes())
    if args.json:
        print(format_processes_json(records))
    elif records:
        print(format_processes_table(records))
    else:
        print("no deployment is running; start one with `dynamo run`")
    return 0


def format_processes_json(records: Sequence[ProcessRecord]) -> str:
    """Return a JSON array of objects with the keys `COLUMNS`, `reason` and `shared_bytes`."""
    keys = (*COLUMNS, "reason", "shared_bytes")
    rows = [{key: getattr(record, key) for key in keys} for record in records]
    return msgspec.json.encode(rows).decode()


def format_processes_table(records: Sequence[ProcessRecord]) -> str:
    """Return a table with a row for each process, and lines that say why some do not serve, and
    what the workers of a deployment share. Addresses lack the incarnation of the process."""
    shown = (replace(record, address=_without_incarnation(record.address)) for record in records)
    cells = (tuple(str(getattr(record, key)) for key in COLUMNS) for record in shown)
    lines = format_table([tuple(key.upper() for key in COLUMNS), *cells])
    reasons = [f"{record.name}: {record.reason}" for record in records if record.reason]
    reasons += [
        f"{record.deployment}: its workers share {record.shared_bytes / 1e6:.0f} MB of weights"
        for record in records
        if record.shared_bytes
    ]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _without_incarnation(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if scheme == "tcp" else address
