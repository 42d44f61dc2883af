#!/usr/bin/env python3
"""Inject every fault of tests/faults/table.py on every kind of planes, run the attacks of
tests/attacks, and write docs/faults.md with a table of each.

    scripts/faults.py [--only WORD] [--planes plain|servers|pods]
    scripts/faults.py --attacks

With --only or --planes, results are printed and the page is not written. With --attacks, only the
attacks are run, and only their table is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conftest import write_tiny_model  # noqa: E402
from tests.faults.cluster import PLANES, Cluster  # noqa: E402
from tests.faults.fault import Fault  # noqa: E402
from tests.faults.pods import PodCluster  # noqa: E402
from tests.faults.table import TABLE  # noqa: E402

PAGE = ROOT / "docs" / "faults.md"
NAMES = {"plain": "file, TCP", "servers": "etcd, NATS", "pods": "Kubernetes"}
HEAD = """\
# Faults

Faults that are injected into a deployment of real processes during streams, with the expected and
the last measured outcome. Written by `make faults` ({when}, {cores} shared cores) with mock
workers, a step every 20 ms and default settings. "The same" means the tokens that a deployment
without the fault generates.

| fault | expected | {planes} |
|---|---|---|---|---|
"""

MORE = """
Every test run also injects faults in one process:

- lost, repeated and reordered events (`tests/conformance`,
  `tests/faults/test_index_consistency.py`)
- deaths of workers at any token (`tests/unit/scheduling/test_migration.py`)
- aborted, half-open and delayed connections, and single lost streams
  (`tests/faults/test_connection_faults.py`)
- frozen and slow workers in virtual time (`tests/unit/runtime/test_failure_detector.py`)
- minutes of a simulated day with crashes, network partitions and disconnecting clients
  (`tests/simulation/test_chaos.py`; `benchmarks/chaos.py` simulates a whole day)
"""

ATTACKS_TITLE = "## What clients and neighbours tried, and what came of it\n"
ATTACKS_HEAD = """
Attacks on real processes with default settings: requests, web pages, other users of the host, odd
surroundings. Written by `make faults` ({when}, {cores} shared cores) from `tests/attacks`, which
every test run repeats. How to serve more than yourself: [security](how-to/security.md).

| attack | what must hold | what came of it |
|---|---|---|
"""


def play(fault: Fault, planes: str, model: Path) -> tuple[bool, str]:
    """Inject a fault. Returns if the outcome is as expected, and a measurement or the error."""
    with tempfile.TemporaryDirectory(prefix="dynamo-faults-") as folder:
        more = {"timing": fault.timing} if fault.timing else {}
        cluster = (PodCluster if planes == "pods" else Cluster)(
            model,
            Path(folder),
            planes,
            workers=fault.workers,
            prefill=fault.prefill,
            decode=fault.decode,
            frontends=fault.frontends,
            flags=fault.flags,
            s3=fault.s3,
            **more,
        )
        try:
            with cluster:
                return True, asyncio.run(fault.run(cluster))
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if os.environ.get("FAULTS_LOG"):
                print(cluster.log)
            return False, (str(error) or type(error).__name__).splitlines()[0][:300]


def attack() -> tuple[str, bool]:
    """Run tests/attacks. Returns the section of the page, and if all attacks came to nothing."""
    with tempfile.TemporaryDirectory(prefix="dynamo-attacks-") as folder:
        path = Path(folder) / "rows"
        path.touch()
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/attacks"],
            cwd=ROOT,
            env=os.environ | {"DYNAMO_ATTACK_ROWS": str(path)},
            check=False,
        )
        if ended.returncode not in {0, 1}:
            raise SystemExit("the attacks did not run; the page is not written")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    outcomes: dict[tuple[str, str], list[str]] = {}
    for attack, expected, text in rows:  # in the order of the files; cases of a test share a row
        outcomes.setdefault((attack, expected), []).append(text)
    lines = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in (*key, _join(texts))) + " |\n"
        for key, texts in outcomes.items()
    ]
    head = ATTACKS_HEAD.format(when=time.strftime("%Y-%m-%d"), cores=os.cpu_count())
    print("".join(lines), end="")
    return ATTACKS_TITLE + head + "".join(lines), ended.returncode == 0


def _join(texts: list[str]) -> str:
    failed = [text for text in texts if text.startswith("**failed")]
    return "; ".join(dict.fromkeys(failed or texts))


def write_page(faults: str = "", attacks: str = "") -> None:
    """Write the parts that are given, and keep the other."""
    old_faults, title, old_attacks = PAGE.read_text().partition(ATTACKS_TITLE)
    faults, attacks = faults or old_faults, attacks or title + old_attacks
    PAGE.write_text(f"{faults.rstrip()}\n\n{attacks}".rstrip() + "\n")


def main() -> int:
    """Inject the chosen faults. Returns 1 if an outcome is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name or function contains this")
    parser.add_argument("--planes", choices=PLANES)
    parser.add_argument("--attacks", action="store_true", help="run only the attacks")
    args = parser.parse_args()
    if args.attacks:
        table, held = attack()
        write_page(attacks=table)
        return int(not held)
    page, failed = inject_faults(args.only, args.planes)
    if not args.only and not args.planes:
        table, held = attack()
        write_page(page, table)
        failed += not held
    return bool(failed)


def inject_faults(only: str, chosen_planes: str | None) -> tuple[str, int]:
    """Inject faults. Returns the first part of the page and the number of failures."""
    rows, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="dynamo-faults-") as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        for fault in TABLE:
            if only not in f"{fault.name} {fault.run.__name__}":
                continue
            cells = []
            for planes in [chosen_planes] if chosen_planes else PLANES:
                if planes not in fault.planes:
                    cells.append("")
                    continue
                started = time.monotonic()
                passed, outcome = play(fault, planes, model)
                failed += not passed
                cells.append(outcome if passed else f"**failed:** {outcome}")
                print(
                    f"{'ok    ' if passed else 'FAILED'} {NAMES[planes]:10} {fault.name}: "
                    f"{outcome} ({time.monotonic() - started:.0f} s)",
                    flush=True,
                )
            rows.append(f"| {fault.name} | {fault.expected} | {' | '.join(cells)} |")
    head = HEAD.format(
        when=time.strftime("%Y-%m-%d"),
        cores=os.cpu_count(),
        planes=" | ".join(NAMES[planes] for planes in PLANES),
    )
    print(f"{failed} outcomes of {len(rows)} faults not as expected; {platform.platform()}")
    return head + "\n".join(rows) + "\n" + MORE, failed


if __name__ == "__main__":
    sys.exit(main())
