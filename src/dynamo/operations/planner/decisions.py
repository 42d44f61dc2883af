"""The decisions of a planner as JSON lines, which a planner reads again after a restart."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dynamo.operations.planner.values import ScaleDecision
from dynamo.runtime.deployment import state_roots

PLANNER_FOLDER = "planner"
"""The name of the folder in the state folder of a deployment."""
FILE, OLD_FILE = "decisions.jsonl", "decisions.1.jsonl"
MAX_BYTES = 8 << 20
"""A file that is larger becomes the old one: together they have some days."""

_decode = msgspec.json.Decoder(ScaleDecision).decode


class PlannerLog:
    """Appends decisions to a file in `folder`. Methods block, and raise `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, decision: ScaleDecision) -> None:
        """Append a decision."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / FILE
        if path.exists() and path.stat().st_size > MAX_BYTES:
            path.replace(self._folder / OLD_FILE)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(decision) + b"\n")


def read_decisions(folder: Path, last: int) -> Sequence[ScaleDecision]:
    """Return the last decisions, oldest first. Lines that cannot be read are left out. Blocks."""
    decisions: deque[ScaleDecision] = deque(maxlen=last)
    for name in (OLD_FILE, FILE):
        path = folder / name
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                decisions.append(_decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # the last line of a planner that died
    return list(decisions)


def find_planner_folder(name: str) -> Path | None:
    """Return the folder of the decisions for a deployment on this host, which need not run; None if
    there are none. `name`: its name or its HTTP port; "" finds the one planned last. Blocks."""
    folders = [path for root in state_roots() for path in root.glob(f"*/{PLANNER_FOLDER}")]
    folders = [path for path in folders if (path / FILE).exists()]
    if name:
        folders = [path for path in folders if path.parent.name in (name, f"http-{name}")]
    return max(folders, key=lambda path: (path / FILE).stat().st_mtime, default=None)
