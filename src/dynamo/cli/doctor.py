"""`dynamo doctor`: check this machine and say what to mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, load_settings

if TYPE_CHECKING:
    from dynamo.operations.doctor import Finding

EXAMPLES = """\
  dynamo doctor
  dynamo doctor --http-port 8080 --json"""


def parser() -> Parser:
    """`--json`, and the settings that a deployment would have."""
    made = Parser(
        "dynamo doctor",
        "Check this machine: does it have what `dynamo run` with the same flags needs?",
        EXAMPLES,
        usage="[--json] [FLAGS of dynamo run]",
    )
    made.add_argument("--json", action="store_true", help="one JSON array")
    add_settings_flags(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Print what was found; 1 if something would keep a deployment from running."""
    found = parser().parse(arguments)
    settings = load_settings(found).settings

    from dynamo.operations.doctor import run_checks

    findings = list(run_checks(settings))
    print(msgspec.json.encode(findings).decode() if found.json else format_findings(findings))
    return 1 if any(one.verdict == "fail" for one in findings) else 0


def format_findings(findings: Sequence[Finding]) -> str:
    """A line a check, and below it what to do."""
    lines = []
    for one in findings:
        lines.append(f"{one.verdict:<5} {one.check:<13} {one.found}")
        if one.hint:
            lines.append(f"{'':<19} -> {one.hint}")
    return "\n".join(lines)
