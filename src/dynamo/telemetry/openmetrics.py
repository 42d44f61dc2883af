"""Metrics in the format that a scraper asks for: Prometheus' text, or OpenMetrics 1.0."""

from __future__ import annotations

from collections.abc import Mapping

OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(text: str, accept: str | None, exemplars: Mapping[str, str]) -> tuple[str, bytes]:
    """Return content type and body for the Accept header of a scraper. `text` is in Prometheus'
    format; `exemplars` are those of its samples, by series."""
    if "application/openmetrics-text" not in (accept or ""):
        return PROMETHEUS_CONTENT_TYPE, text.encode()
    return OPENMETRICS_CONTENT_TYPE, to_openmetrics(text, exemplars).encode()


def to_openmetrics(text: str, exemplars: Mapping[str, str]) -> str:
    """Return metrics in the format of OpenMetrics. Names of counters that do not end in `_total`
    are of unknown type there."""
    lines: list[str] = []
    family, help_line = "", ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            help_line = line
        elif line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ", 3)
            name = family
            if kind in ("counter", "untyped"):
                name = family.removesuffix("_total")
                kind = "counter" if name != family and kind == "counter" else "unknown"
            lines.append(f"# TYPE {name} {kind}")
            if help_line.startswith(f"# HELP {family} "):
                lines.append(f"# HELP {name} {_escape_quotes(help_line.split(' ', 3)[3])}")
        elif line and line[0] != "#":
            series = line.rpartition(" ")[0]
            lines.append(f"{line}{exemplars.get(series, '')}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _escape_quotes(text: str) -> str:
    return text.replace('"', '\\"')
