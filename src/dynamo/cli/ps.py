"""`dynamo ps`: list the live processes of this user's deployments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser, format_table

if TYPE_CHECKING:
    from dynamo.runtime.deployment import ProcessRecord

COLUMNS = ("deployment", "role", "name", "pid", "address", "status_url", "state", "restarts")

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

    from dynamo.runtime.deployment import live_processes

    records = live_processes()
    if args.json:
        print(format_processes_json(records))
    elif records:
        print(format_processes_table(records))
    else:
        print("no deployment is running; start one with `dynamo run`")
    return 0


def format_processes_json(records: Sequence[ProcessRecord]) -> str:
    """Return a JSON array of objects with the keys `COLUMNS`."""
    rows = [{key: getattr(record, key) for key in COLUMNS} for record in records]
    return msgspec.json.encode(rows).decode()


def format_processes_table(records: Sequence[ProcessRecord]) -> str:
    """Return a table with a row for each process."""
    rows = [COLUMNS, *(tuple(str(getattr(record, key)) for key in COLUMNS) for record in records)]
    return "\n".join(format_table(rows))
