"""What was measured beside what is aimed at."""

from __future__ import annotations

import json
import os
from typing import Any

LOAD_BEFORE = os.getloadavg()[0]


class Bars:
    """Collects them; tells them with everything else."""

    def __init__(self) -> None:
        self._rows: list[tuple[bool, str]] = []

    def at_most(self, what: str, found: float, bar: float, unit: str = "") -> None:
        """Found must not be above."""
        self._rows.append((found <= bar, f"{what}: {found:g}{unit} (at most {bar:g}{unit})"))

    def at_least(self, what: str, found: float, bar: float, unit: str = "") -> None:
        """Found must not be below."""
        self._rows.append((found >= bar, f"{what}: {found:g}{unit} (at least {bar:g}{unit})"))

    def tell(self, result: dict[str, Any], title: str) -> None:
        """Print everything as JSON, then a line a bar."""
        print(json.dumps(result, indent=1))
        print(f"\n{title}; load {LOAD_BEFORE:.1f} before, {os.getloadavg()[0]:.1f} after")
        for met, row in self._rows:
            print(f"  {'met   ' if met else 'MISSED'}  {row}")
