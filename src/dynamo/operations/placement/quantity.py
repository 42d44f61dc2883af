"""Quantities of Kubernetes, such as 500m, 2Gi and 1e3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

PATTERN = (
    r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE])|[eE]([+-]?[0-9]+))?"
)
_QUANTITY = re.compile(PATTERN)
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{letter: 1000**power for power, letter in enumerate("kMGTPE", 1)},
}
MAX_EXPONENT = 30
GPU = "nvidia.com/gpu"


@lru_cache(4096)
def parse_quantity(text: str | float) -> int:
    """Return a quantity in thousandths, rounded up. Raises `ValueError`."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or abs(int(match[4] or 0)) > MAX_EXPONENT:
        raise ValueError(f"{text!r} is no quantity: write 2, 500m or 16Gi")
    sign, number, unit, exponent = match.groups()
    factor = _BINARY.get(unit) or _DECIMAL.get(unit) or Fraction(10) ** int(exponent or 0)
    amount = Fraction(number) * factor * 1000
    return int(-(-amount // 1)) * (-1 if sign == "-" else 1)


def format_quantity(amount: int) -> str:
    """Return thousandths as a number, or with the suffix `m` or `Gi`."""
    if amount % 1000:
        return f"{amount}m"
    whole = amount // 1000
    return f"{whole >> 30}Gi" if whole and not whole % (1 << 30) else str(whole)


def pod_requests(spec: Mapping[str, object]) -> Mapping[str, int]:
    """Return what a pod of this spec asks for: the sums of its containers, or the largest of its
    init containers. A limit is a request where there is none. Raises `ValueError`."""
    total: dict[str, int] = {"pods": 1000}
    for name in ("containers", "initContainers"):
        for container in _list(spec.get(name)):
            resources = container.get("resources") or {}
            wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
            for resource, text in wanted.items():
                amount = parse_quantity(text)
                if name == "containers":
                    total[resource] = total.get(resource, 0) + amount
                else:
                    total[resource] = max(total.get(resource, 0), amount)
    return total


def _list(value: object) -> list[dict[str, dict[str, dict[str, str]]]]:
    return value if isinstance(value, list) else []
