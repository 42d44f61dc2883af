"""The table of alerts in the form of Prometheus' rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.operations.alerts.conditions import AlertRule

_SETTING = re.compile(r"\{([a-z_.]+)\}")


def prometheus_rules(rules: Sequence[AlertRule]) -> Mapping[str, Any]:
    """Return the content of the rules file. Advice for some settings is given for all."""
    return {"groups": [{"name": "dynamo", "rules": [_rule(rule) for rule in rules]}]}


def _rule(rule: AlertRule) -> Mapping[str, Any]:
    return {
        "alert": rule.name,
        "expr": rule.to_promql(),
        **({"for": f"{rule.for_s}s"} if rule.for_s else {}),
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.felt, "description": general_advice(rule)},
    }


def general_advice(rule: AlertRule) -> str:
    """Return the advice of a rule for any settings."""
    advice = _SETTING.sub(r"\1", rule.advice)
    return " ".join([advice, *(f"With {k}: {text}" for k, text in rule.advice_where.items())])
