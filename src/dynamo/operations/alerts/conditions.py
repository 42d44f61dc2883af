"""Conditions over metrics, with the meaning that they have in Prometheus' query language."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

SETTING = re.compile(r"\{([a-z_.]+)\}")
"""A setting whose value an advice names."""
Combine = Literal["sum", "max", "min", "distinct"]


class Series(msgspec.Struct, frozen=True):
    """A number by metric: the level of a gauge, or the growth of a counter in `window_s`.

    `where` has patterns of labels. `combine` joins the samples of one alert; `distinct` counts the
    values of the label `label`.
    """

    metric: str
    where: Mapping[str, str] = {}
    window_s: int = 0
    combine: Combine = "sum"
    label: str = ""

    def to_promql(self, by: tuple[str, ...]) -> str:
        """Return the query for this number, by these labels."""
        matchers = ",".join(f'{label}=~"{pattern}"' for label, pattern in self.where.items())
        selector = f"{self.metric}{{{matchers}}}" if matchers else self.metric
        if self.window_s:
            selector = f"increase({selector}[{self.window_s}s])"
        group = f" by ({', '.join(by)})" if by else ""
        if self.combine != "distinct":
            return f"{self.combine}{group} ({selector})"
        return f"count{group} (count by ({', '.join((*by, self.label))}) ({selector}))"


class AlertCondition(msgspec.Struct, frozen=True):
    """Holds while `value - minus`, divided by `over`, is above (or with `below`, below) the
    `threshold`, and the dividend is at least `least`, so that light traffic does not count."""

    value: Series
    threshold: float
    below: bool = False
    minus: Series | None = None
    over: Series | None = None
    least: float = 0.0

    @property
    def series(self) -> tuple[Series, ...]:
        """The numbers that the condition reads."""
        return tuple(each for each in (self.value, self.minus, self.over) if each is not None)

    def breaks(self, value: float) -> bool:
        """Whether a value is beyond the threshold."""
        return value < self.threshold if self.below else value > self.threshold

    def to_promql(self, by: tuple[str, ...]) -> str:
        """Return the condition as a query."""
        dividend = self.value.to_promql(by)
        if self.minus is not None:
            dividend = f"({dividend} - {self.minus.to_promql(by)})"
        value = dividend if self.over is None else f"{dividend} / {self.over.to_promql(by)}"
        text = f"{value} {'<' if self.below else '>'} {self.threshold:g}"
        return f"{text} and {dividend} >= {self.least:g}" if self.least else text


class AlertRule(msgspec.Struct, frozen=True):
    """A rule: an alert is active for each group of the labels `by` for which all `conditions` have
    held for `for_s`. `felt` says what users notice, `advice` what to do; `{router.mode}` in it is
    the value of that setting. Sentences of `advice_where` hold with `setting=value` in force."""

    name: str
    severity: Literal["page", "ticket"]
    conditions: tuple[AlertCondition, ...]
    felt: str
    advice: str
    by: tuple[str, ...] = ()
    for_s: int = 0
    advice_where: Mapping[str, str] = {}

    def to_promql(self) -> str:
        """Return all conditions as one query."""
        return "\nand ".join(condition.to_promql(self.by) for condition in self.conditions)

    @property
    def general_advice(self) -> str:
        """The advice for any settings."""
        advice = SETTING.sub(r"\1", self.advice)
        return " ".join([advice, *(f"With {k}: {text}" for k, text in self.advice_where.items())])


def prometheus_rules(rules: Sequence[AlertRule]) -> Mapping[str, Any]:
    """Return the content of Prometheus' rules file."""
    shown = [
        {
            "alert": rule.name,
            "expr": rule.to_promql(),
            **({"for": f"{rule.for_s}s"} if rule.for_s else {}),
            "labels": {"severity": rule.severity},
            "annotations": {"summary": rule.felt, "description": rule.general_advice},
        }
        for rule in rules
    ]
    return {"groups": [{"name": "dynamo", "rules": shown}]}
