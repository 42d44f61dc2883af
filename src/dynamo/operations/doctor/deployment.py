"""Checks of a running deployment by the status ports of its processes on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from dynamo.core.settings import Settings
from dynamo.operations.doctor.checks import Finding, Verdict
from dynamo.operations.running import ProcessReading, fetch, read_processes
from dynamo.runtime.deployment import add_waiting_children, deployment_of

SERVING_STATES = ("ready", "standby", "sleeping")
METRICS_OF_ROLES: Mapping[str, str] = {
    "frontend": "dynamo_frontend_inflight_requests",
    "worker": "dynamo_worker_",
    "prefill_worker": "dynamo_worker_",
    "decode_worker": "dynamo_worker_",
    "supervisor": "dynamo_supervisor_",
}
"""The beginning of a metric that every process of a role has."""


def check_running(settings: Settings) -> Iterator[Finding]:
    """Check the deployment of these settings, if it runs."""
    records = add_waiting_children(deployment_of(settings).live_processes())
    if records:
        yield from check_readings(read_processes(records))


def check_readings(readings: Sequence[ProcessReading]) -> Iterator[Finding]:
    """Check the processes of a deployment by what their status ports have answered."""
    answering = [reading for reading in readings if not reading.error]
    yield _check_processes(readings)
    yield _check_workers(answering)
    yield _check_planes(answering)
    yield _check_equal(
        "versions", "version", answering, "restart the processes with the older version"
    )
    yield _check_equal(
        "settings",
        "config",
        answering,
        "restart the processes, or reload the file (SIGHUP to the supervisor)",
    )
    yield _check_metrics(answering)
    yield _check_alerts(answering)


def _check_processes(readings: Sequence[ProcessReading]) -> Finding:
    troubles = []
    for reading in readings:
        record = reading.record
        if record.state not in SERVING_STATES:
            reason = f" ({record.reason})" if record.reason else ""
            troubles.append(f"{record.name} is {record.state}{reason}")
        elif reading.error:
            troubles.append(f"{record.name}: {reading.error}")
        elif reasons := reading.health.get("reasons"):
            troubles.append(f"{record.name}: {'; '.join(map(str, reasons.values()))}")
    if troubles:
        hint = "the log says more: `dynamo report FILE` collects it"
        return Finding("processes", "fail", "; ".join(troubles), hint)
    return Finding("processes", "ok", f"all {len(readings)} serve")


def _check_workers(readings: Sequence[ProcessReading]) -> Finding:
    """Check that frontends can call every announced worker."""
    excluded: dict[str, str] = {}
    limits: dict[str, str] = {}
    for reading in readings:
        for key in ("refused_workers", "unreachable_workers"):
            excluded |= reading.health.get(key) or {}
        for name, text in (reading.health.get("limitations") or {}).items():
            limits[f"{reading.record.name}: {name}"] = text
    if excluded:
        text = "; ".join(f"{worker}: {reason}" for worker, reason in excluded.items())
        hint = "give all processes the same model, --block-size and security.secret"
        return Finding("workers", "fail", f"no requests go to {text}", hint)
    if limits:
        text = "; ".join(f"{name}: {text}" for name, text in limits.items())
        return Finding("workers", "warn", text, "requests continue; mend what is named")
    return Finding("workers", "ok", "no limitation")


def _check_planes(readings: Sequence[ProcessReading]) -> Finding:
    away: dict[str, list[str]] = {}
    for reading in readings:
        planes = reading.health.get("planes") or {}
        for plane, error in (planes.get("away") or {}).items():
            away.setdefault(f"{plane}: {error}", []).append(reading.record.name)
    if away:
        text = "; ".join(f"{error} ({', '.join(names)})" for error, names in away.items())
        return Finding("connections", "fail", text, "start the plane's server, or mend the network")
    return Finding("connections", "ok", "every process reaches its planes")


def _check_equal(check: str, key: str, readings: Sequence[ProcessReading], hint: str) -> Finding:
    """Check that all processes tell the same value in `/health`."""
    names: dict[str, list[str]] = {}
    for reading in readings:
        if value := reading.health.get(key):
            names.setdefault(str(value), []).append(reading.record.name)
    if len(names) > 1:
        text = "; ".join(f"{value}: {', '.join(of_value)}" for value, of_value in names.items())
        return Finding(check, "warn", f"they differ: {text}", hint)
    return Finding(check, "ok", f"equal: {next(iter(names), 'unknown')}")


def _check_metrics(readings: Sequence[ProcessReading]) -> Finding:
    """Check that status ports have the metrics of their role, and that Prometheus finds them."""
    empty = [
        reading.record.name
        for reading in readings
        if METRICS_OF_ROLES.get(reading.record.role, "") not in reading.metrics
    ]
    if empty:
        text = f"no metrics of their role: {', '.join(empty)}"
        return Finding("metrics", "warn", text, "restart these processes")
    address = next((r.record.address for r in readings if r.record.role == "frontend"), "")
    if not address.startswith("http://"):
        return Finding("metrics", "ok", f"{len(readings)} status ports answer")
    try:
        groups: list[Any] = msgspec.json.decode(fetch(address, "/metrics/targets"))
        targets = set(chain.from_iterable(group["targets"] for group in groups))
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        return Finding("metrics", "warn", f"{address}/metrics/targets failed: {error}")
    missing = len(readings) - len(targets)
    verdict: Verdict = "ok" if missing <= 0 else "warn"
    hint = "set runtime.status_host where status ports listen on loopback" if missing > 0 else ""
    text = f"{len(readings)} status ports answer; Prometheus finds {len(targets)}"
    return Finding("metrics", verdict, text, hint)


def _check_alerts(readings: Sequence[ProcessReading]) -> Finding:
    alerts = [alert for reading in readings for alert in reading.health.get("alerts") or ()]
    if not alerts:
        return Finding("alerts", "ok", "none is active")
    names = [
        f"{each['name']} ({each['about']})" if each["about"] else each["name"] for each in alerts
    ]
    pages = any(alert["severity"] == "page" for alert in alerts)
    hints = dict.fromkeys(alert["advice"] for alert in alerts)
    return Finding("alerts", "fail" if pages else "warn", ", ".join(names), " ".join(hints))
