"""Target values of a benchmark, checked and printed with its result."""

from __future__ import annotations

import json
import os
from typing import Any

LOAD_BEFORE = os.getloadavg()[0]


class Targets:
    """Collects measured values with their limits."""

    def __init__(self) -> None:
        self._rows: list[tuple[bool, str]] = []

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Add a value that must not be above `limit`."""
        self._rows.append((value <= limit, f"{name}: {value:g}{unit} (at most {limit:g}{unit})"))

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Add a value that must not be below `limit`."""
        self._rows.append((value >= limit, f"{name}: {value:g}{unit} (at least {limit:g}{unit})"))

    def print_report(self, result: dict[str, Any], title: str) -> None:
        """Print the result as JSON, then a line for each target."""
        print(json.dumps(result, indent=1))
        print(f"\n{title}; load {LOAD_BEFORE:.1f} before, {os.getloadavg()[0]:.1f} after")
        for met, row in self._rows:
            print(f"  {'met   ' if met else 'MISSED'}  {row}")

    @property
    def exit_code(self) -> int:
        """1 if a target was missed."""
        return 0 if all(met for met, _ in self._rows) else 1
