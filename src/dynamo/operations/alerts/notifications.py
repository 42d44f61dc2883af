"""`AlertManager`: begins and ends alerts, and sends notifications to the log, a webhook and a
command."""

from __future__ import annotations

import asyncio
import logging
import shlex
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from itertools import groupby
from typing import Any

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.settings import Settings
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.values import shown_value
from dynamo.operations.alerts.conditions import SETTING, AlertRule
from dynamo.operations.alerts.evaluator import Firing

log = logging.getLogger(__name__)

MAX_ALERTS = 256
SEND_TIMEOUT_S = 10.0


class AlertType(Enum):
    """The kinds of alerts of programs; those of the table of rules have its names."""

    LOW_THROUGHPUT = "low_throughput"
    HIGH_LATENCY = "high_latency"
    RESOURCE_PRESSURE = HIGH_RESOURCE_USAGE = "resource_pressure"
    LOW_CACHE_HIT = LOW_CACHE_HIT_RATIO = "low_cache_hit"
    NETWORK_SLOW = HIGH_NETWORK_USAGE = "network_slow"
    WORKER_LOST = "worker_lost"
    BUDGET_BURN = "budget_burn"


class ActiveAlert(msgspec.Struct, frozen=True):
    """An alert that began at the Unix time `since_s`. `about` has the values of its labels, such as
    the process, `message` what users notice."""

    name: str
    severity: str
    about: str
    value: float
    since_s: float
    message: str
    advice: str = ""
    silenced: bool = False


class AlertManager:
    """Keeps the active alerts, and the last ones that were sent. Alerts of one rule that begin
    or end together are one notification. A sink that fails is counted and logged."""

    def __init__(
        self, clock: Clock | None = None, settings: Settings | None = None, source: str = ""
    ) -> None:
        """`source` names the deployment in notifications."""
        self._clock = clock or SystemClock()
        self._settings = settings or Settings()
        self._source = source
        self.alerts: deque[ActiveAlert] = deque(maxlen=MAX_ALERTS)
        self.active: dict[tuple[str, ...], ActiveAlert] = {}
        self.failed_notifications = 0

    async def send_alert(self, alert_type: AlertType, message: str) -> None:
        """Send an alert that has no end."""
        alert = ActiveAlert(alert_type.value, "ticket", "", 0.0, self._clock.wall(), message)
        await self._notify("firing", [alert])

    async def update(self, firing: Sequence[Firing]) -> None:
        """Begin the alerts that are new among `firing`, and end those that are not among them."""
        before, now = self.active, self._clock.wall()
        self.active = {
            (name, *group): self._activate(alert, before.get((name, *group)), now)
            for alert in firing
            for name, group in [alert.key]
        }
        for status, keys in (
            ("firing", self.active.keys() - before.keys()),
            ("resolved", before.keys() - self.active.keys()),
        ):
            ordered = sorted(keys)
            for _, same_rule in groupby(ordered, key=lambda key: key[0]):
                await self._notify(status, [(before | self.active)[key] for key in same_rule])

    def _activate(self, alert: Firing, known: ActiveAlert | None, now: float) -> ActiveAlert:
        rule = alert.rule
        return ActiveAlert(
            name=rule.name,
            severity=rule.severity,
            about=", ".join(alert.labels.values()),
            value=alert.value,
            since_s=known.since_s if known else now,
            message=rule.felt,
            advice=known.advice if known else advise(rule, self._settings),
            silenced=rule.name in self._settings.alerts.silenced,
        )

    async def _notify(self, status: str, alerts: Sequence[ActiveAlert]) -> None:
        """Send one notification on alerts of the same rule. Returns after all sinks."""
        if alerts[0].silenced:
            return
        if status == "firing":
            self.alerts.extend(alerts)
        names = ", ".join(alert.about for alert in alerts if alert.about)
        first, sinks = alerts[0], self._settings.alerts
        fields: dict[str, Any] = {"alert": first.name, "about": names, "message": first.message}
        if status == "firing":
            log.warning("alert", extra={"fields": fields | {"advice": first.advice}})
        else:
            log.info("alert ended", extra={"fields": fields})
        payload = msgspec.json.encode(_webhook_body(status, alerts, self._source))
        if sinks.webhook:
            await self._attempt("webhook", _post, sinks.webhook, payload)
        if sinks.command:
            await self._attempt("command", _run, sinks.command, payload)

    async def _attempt(self, sink: str, send: Callable[..., Any], *arguments: Any) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(*arguments)
        except (OSError, TimeoutError, ValueError) as error:
            self.failed_notifications += 1
            fields = {"sink": sink, "error": str(error) or type(error).__name__}
            log.warning("an alert was not sent", extra={"fields": fields})


def advise(rule: AlertRule, settings: Settings) -> str:
    """Return the advice of a rule with the settings in force."""
    sentences = [SETTING.sub(lambda key: f"{key[1]} = {_value_of(key[1], settings)}", rule.advice)]
    for condition, sentence in rule.advice_where.items():
        key, _, value = condition.partition("=")
        if _value_of(key, settings) == value:
            sentences.append(sentence)
    return " ".join(sentences)


def _value_of(key: str, settings: Settings) -> str:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return str(shown_value(setting_specs_by_key()[key], value))


def _webhook_body(status: str, alerts: Sequence[ActiveAlert], source: str) -> Mapping[str, Any]:
    """Return the body that Alertmanager sends to webhooks (version 4)."""
    name = alerts[0].name
    return {
        "version": "4",
        "status": status,
        "receiver": "dynamo",
        "groupKey": name,
        "groupLabels": {"alertname": name},
        "commonLabels": {"alertname": name, "severity": alerts[0].severity, "deployment": source},
        "commonAnnotations": {"summary": alerts[0].message, "description": alerts[0].advice},
        "alerts": [_webhook_alert(status, alert) for alert in alerts],
    }


def _webhook_alert(status: str, alert: ActiveAlert) -> Mapping[str, Any]:
    started = datetime.fromtimestamp(alert.since_s, UTC)
    labels = {"alertname": alert.name, "severity": alert.severity, "about": alert.about}
    texts = {"summary": alert.message, "description": alert.advice, "value": f"{alert.value:g}"}
    return {"status": status, "labels": labels, "annotations": texts, "startsAt": started}


async def _post(url: str, body: bytes) -> None:
    """Post a body. Raises `OSError`, also for another status than 2xx."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - checked by the setting
    opened = await asyncio.to_thread(urllib.request.urlopen, request, timeout=SEND_TIMEOUT_S)
    opened.close()


async def _run(command: str, body: bytes) -> None:
    """Run a program with the notification on its standard input. Raises `OSError` if it fails."""
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await process.communicate(body)
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        text = errors.decode(errors="replace").strip()[-200:]
        raise OSError(f"the command ended with {process.returncode}: {text}")
