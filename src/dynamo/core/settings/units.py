"""Parsing of sizes, durations and cores. A number without a unit has the documented unit."""

from __future__ import annotations

import re

SIZE_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
    "t": 10**12, "tb": 10**12,
    "ki": 2**10, "kib": 2**10, "mi": 2**20, "mib": 2**20, "gi": 2**30, "gib": 2**30,
    "ti": 2**40, "tib": 2**40,
}  # fmt: skip
DURATION_FACTORS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0,
    "d": 86400.0,
}  # fmt: skip

_NUMBER_WITH_UNIT = re.compile(r"\s*((?:\d[\d_]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)")


def parse_size(text: str) -> int:
    """Return the bytes of "4096", "8GB" (decimal) or "16Gi" (binary). Raises `ValueError`."""
    match = _NUMBER_WITH_UNIT.fullmatch(text.strip())
    factor = SIZE_FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError("wanted a size such as 4096, 512KB, 8GB or 16Gi")
    size = float(match[1]) * factor if "." in match[1] or "e" in match[1].lower() else None
    return int(match[1]) * factor if size is None else round(size)


def parse_seconds(text: str) -> float:
    """Return the seconds of "15", "15s", "2m", "1h30m" or "300ms". Raises `ValueError`."""
    parts = list(_NUMBER_WITH_UNIT.finditer(text))
    whole = "".join(part[0] for part in parts) == text.rstrip()
    if len(parts) == 1 and whole and not parts[0][2]:
        return float(parts[0][1])
    if not parts or not whole or any(part[2].lower() not in DURATION_FACTORS for part in parts):
        raise ValueError("wanted a duration such as 15, 15s, 2m or 300ms")
    return sum(float(part[1]) * DURATION_FACTORS[part[2].lower()] for part in parts)


def parse_gibibytes(text: str) -> float:
    """Return the GiB of "4", "4GB" or "512Mi". Raises `ValueError`."""
    try:
        return float(text)
    except ValueError:
        return parse_size(text) / 2**30


def parse_cores(text: str) -> float:
    """Return the processor cores of "2", "0.5" or "500m". Raises `ValueError`."""
    match = _NUMBER_WITH_UNIT.fullmatch(text.strip())
    if match is None or match[2] not in {"", "m"}:
        raise ValueError("wanted cores such as 2, 0.5 or 500m")
    return float(match[1]) / (1000 if match[2] else 1)
