#!/usr/bin/env python3
"""Inject every fault of tests/faults/table.py on every kind of planes and write docs/faults.md.

    scripts/faults.py [--only WORD] [--planes plain|servers]

With --only or --planes, results are printed and the page is not written.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conftest import write_tiny_model  # noqa: E402
from tests.faults.cluster import PLANES, Cluster  # noqa: E402
from tests.faults.table import TABLE, Fault  # noqa: E402

PAGE = ROOT / "docs" / "faults.md"
NAMES = {"plain": "file, TCP", "servers": "etcd, NATS"}
HEAD = """\
# Faults

Faults that are injected into a deployment of real processes during streams, with the expected and
the last measured outcome. Written by `make faults` ({when}, {cores} shared cores) with mock
workers, a step every 20 ms and default settings. "The same" means the tokens that a deployment
without the fault generates.

| fault | expected | {planes} |
|---|---|---|---|
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


def play(fault: Fault, planes: str, model: Path) -> tuple[bool, str]:
    """Inject a fault. Returns if the outcome is as expected, and a measurement or the error."""
    with tempfile.TemporaryDirectory(prefix="dynamo-faults-") as folder:
        more = {"timing": fault.timing} if fault.timing else {}
        cluster = Cluster(
            model,
            Path(folder),
            planes,
            workers=fault.workers,
            frontends=fault.frontends,
            flags=fault.flags,
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


def main() -> int:
    """Inject the chosen faults. Returns 1 if an outcome is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name or function contains this")
    parser.add_argument("--planes", choices=PLANES)
    args = parser.parse_args()
    rows, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="dynamo-faults-") as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        for fault in TABLE:
            if args.only not in f"{fault.name} {fault.run.__name__}":
                continue
            cells = []
            for planes in [args.planes] if args.planes else PLANES:
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
    if not args.only and not args.planes:
        head = HEAD.format(
            when=time.strftime("%Y-%m-%d"),
            cores=os.cpu_count(),
            planes=" | ".join(NAMES[planes] for planes in PLANES),
        )
        PAGE.write_text(head + "\n".join(rows) + "\n" + MORE)
    print(f"{failed} outcomes of {len(rows)} faults not as expected; {platform.platform()}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
