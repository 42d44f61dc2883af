"""Several processes' metrics as one: what a port that is shared by several frontends answers."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.telemetry.metrics import format_number


def render_merged(texts: Sequence[str]) -> str:
    """Sum the samples of several Prometheus texts; gauges declared `merge="max"` take the largest.

    Order: as first seen. The texts are what `Registry.render` wrote.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    largest: set[str] = set()
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                _add_header(heads, family, line)
            elif line.startswith("# "):
                _add_header(heads, family, line)
                if line == f"# MERGE {family} max":
                    largest.add(family)
            elif line:
                name, _, value = line.rpartition(" ")
                _merge_sample(samples.setdefault(family, {}), name, float(value), family in largest)
    lines: list[str] = []
    for family, head in heads.items():
        lines += head
        lines += [
            f"{name} {format_number(value)}" for name, value in samples.get(family, {}).items()
        ]
    return "\n".join(lines) + "\n"


def _add_header(heads: dict[str, list[str]], family: str, line: str) -> None:
    known = heads.setdefault(family, [])
    if line not in known:
        known.append(line)


def _merge_sample(family: dict[str, float], name: str, value: float, largest: bool) -> None:
    if name not in family:
        family[name] = value
    elif largest:
        family[name] = max(family[name], value)
    else:
        family[name] += value
