"""`dynamo doctor`: check this machine and a running deployment, and suggest fixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.core.redaction import redact

if TYPE_CHECKING:
    from dynamo.operations.doctor.checks import Finding

EXAMPLES = """\
  dynamo doctor
  dynamo doctor --http-port 8080 --json"""


def parser() -> Parser:
    """Return the parser: `--json` and the settings of a deployment."""
    parser = Parser(
        "dynamo doctor",
        "Check this machine for `dynamo run` with the same flags, and their running deployment.",
        EXAMPLES,
        usage="[--json] [--network] [FLAGS of dynamo run]",
    )
    parser.add_argument("--json", action="store_true", help="one JSON array")
    parser.add_argument(
        "--network", action="store_true", help="check buffers of connections and RDMA, too"
    )
    add_settings_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the checks and print the findings. Returns 1 if a check failed."""
    args = parser().parse(arguments)
    settings = load_settings(args).settings

    from dynamo.operations.doctor.checks import run_checks
    from dynamo.operations.doctor.deployment import check_running

    findings = [*run_checks(settings), *check_running(settings)]
    if args.network:
        from dynamo.operations.doctor.network import check_network

        findings += check_network()
    text = msgspec.json.encode(findings).decode() if args.json else format_findings(findings)
    print(redact(text))
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def format_findings(findings: Sequence[Finding]) -> str:
    """Format each finding as a line, with its hint below."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<5} {finding.check:<15} {finding.message}")
        if finding.hint:
            lines.append(f"{'':<21} -> {finding.hint}")
    return "\n".join(lines)
