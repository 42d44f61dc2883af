"""`dynamo ps`: every live process of every deployment of this user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser

if TYPE_CHECKING:
    from dynamo.runtime.deployment import ProcessRecord

COLUMNS = ("deployment", "role", "name", "pid", "address", "status_url", "state")

EXAMPLES = """\
  dynamo ps
  dynamo ps --json"""


def parser() -> Parser:
    """`--json`."""
    made = Parser("dynamo ps", "List the live processes of every deployment of yours.", EXAMPLES)
    made.add_argument("--json", action="store_true", help="one JSON array")
    return made


def run(arguments: Sequence[str]) -> int:
    """Print a table, or JSON."""
    found = parser().parse(arguments)

    from dynamo.runtime.deployment import live_processes

    records = live_processes()
    if found.json:
        print(format_processes_json(records))
    elif records:
        print(format_processes_table(records))
    else:
        print("no deployment runs; start one with `dynamo run`")
    return 0


def format_processes_json(records: Sequence[ProcessRecord]) -> str:
    """One array of objects with the keys `COLUMNS`."""
    rows = [{key: getattr(record, key) for key in COLUMNS} for record in records]
    return msgspec.json.encode(rows).decode()


def format_processes_table(records: Sequence[ProcessRecord]) -> str:
    """Columns as wide as their longest entry."""
    rows = [COLUMNS, *(tuple(str(getattr(one, key)) for key in COLUMNS) for one in records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)
