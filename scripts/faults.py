#!/usr/bin/env python3
"""Every fault of tests/faults/table.py on every kind of planes; writes docs/faults.md.

    scripts/faults.py [--only WORD] [--planes plain|servers] [--dry]

Without --only and --planes the page is written anew; else what was found is printed.
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
from tests.faults.stage import PLANES, Stage  # noqa: E402
from tests.faults.table import TABLE, Fault  # noqa: E402

PAGE = ROOT / "docs" / "faults.md"
NAMES = {"plain": "file, TCP", "servers": "etcd, NATS"}
HEAD = """\
# Faults

What is done to a deployment of real processes while streams run through it, what is to come of it,
and what came of it last. Written by `make faults` ({when}, {cores} shared cores); mock workers,
a step every 20 ms, defaults only. "The same" means: token by token what an undisturbed deployment
answers.

| fault | expected | {planes} |
|---|---|---|---|
"""

MORE = """
Beside these, in one process and on every test run: events lost, doubled and out of order
(`tests/conformance`, `tests/faults/test_index_truth.py`), any deaths at any token
(`tests/unit/scheduling/test_migration.py`), cut, half-open and delayed connections and single
streams that get lost (`tests/faults/test_wires.py`), frozen against slow workers on virtual time
(`tests/unit/runtime/test_watch.py`), and minutes of a bad day, in which workers crash, the
network breaks and clients leave many times over (`tests/simulation/test_day.py`; a whole day:
`benchmarks/day.py`).
"""


def play(fault: Fault, planes: str, model: Path) -> tuple[bool, str]:
    """Whether it came as expected, and what was measured or went wrong."""
    with tempfile.TemporaryDirectory(prefix="dynamo-faults-") as folder:
        more = {"timing": fault.timing} if fault.timing else {}
        stage = Stage(
            model,
            Path(folder),
            planes,
            workers=fault.workers,
            frontends=fault.frontends,
            flags=fault.flags,
            **more,
        )
        try:
            with stage:
                return True, asyncio.run(fault.play(stage))
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if os.environ.get("FAULTS_LOG"):
                print(stage.log)
            return False, (str(error) or type(error).__name__).splitlines()[0][:300]


def main() -> int:
    """Exit code 1 where something came otherwise than expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name or function has this in it")
    parser.add_argument("--planes", choices=PLANES)
    args = parser.parse_args()
    rows, bad = [], 0
    with tempfile.TemporaryDirectory(prefix="dynamo-faults-") as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        for fault in TABLE:
            if args.only not in f"{fault.name} {fault.play.__name__}":
                continue
            cells = []
            for planes in [args.planes] if args.planes else PLANES:
                if planes not in fault.planes:
                    cells.append("")
                    continue
                began = time.monotonic()
                good, said = play(fault, planes, model)
                bad += not good
                cells.append(said if good else f"**failed:** {said}")
                print(
                    f"{'ok  ' if good else 'BAD '} {NAMES[planes]:10} {fault.name}: {said} "
                    f"({time.monotonic() - began:.0f} s)",
                    flush=True,
                )
            rows.append(f"| {fault.name} | {fault.expected} | {' | '.join(cells)} |")
    if not args.only and not args.planes:
        head = HEAD.format(
            when=time.strftime("%Y-%m-%d"),
            cores=os.cpu_count(),
            planes=" | ".join(NAMES[one] for one in PLANES),
        )
        PAGE.write_text(head + "\n".join(rows) + "\n" + MORE)
    print(f"{bad} of {len(rows)} not as expected; {platform.platform()}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
