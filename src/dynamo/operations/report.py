"""The report on a fault: what processes tell of themselves, and their last lines and stacks."""

from __future__ import annotations

import io
import os
import platform
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

import dynamo
from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.redaction import redact
from dynamo.core.settings import LoadedSettings
from dynamo.core.settings.explain import effective_settings
from dynamo.core.settings.load import DEFAULT_ORIGIN
from dynamo.operations.doctor.deployment import check_readings
from dynamo.operations.router_client import RouterClient
from dynamo.operations.running import ProcessReading, read_processes
from dynamo.runtime.deployment import Deployment, ProcessRecord, add_waiting_children
from dynamo.runtime.processes.supervisor_report import SupervisorReport, ask_supervisor
from dynamo.telemetry.logs import PROMPTS_LOGGER

CONTROL_TIMEOUT_S = 4.0
LIBRARIES = ("uvloop", "msgspec", "tokenizers", "numpy", "torch", "vllm", "nats-py")
KERNEL_FILES = ("status", "wchan", "limits")
Files = Mapping[str, str]


def collect(deployment: Deployment | None, loaded: LoadedSettings) -> Files:
    """Return the texts of a report by their names. Nothing secret is in them. Takes some seconds,
    also while processes hang. `missing.txt` says what could not be read."""
    files = {"versions.json": _encode(_versions()), "origins.json": _encode(_origins(loaded))}
    missing: list[str] = []
    if deployment is not None:
        records = add_waiting_children(deployment.live_processes())
        with ThreadPoolExecutor(2) as threads:
            answer = threads.submit(_read_report, deployment, missing)
            stories = threads.submit(_ask_observer, records, loaded, missing)
            readings = read_processes(records)
            report = answer.result()
            files["stories.json"] = _encode(stories.result())
        missing += [f"{each.record.name}: {each.error}" for each in readings if each.error]
        files |= _of_processes(readings)
        files["settings.json"] = _encode(report.settings)
        for name, lines in report.lines.items():
            own = (line for line in lines if PROMPTS_LOGGER not in line)
            files[f"logs/{name}.txt"] = "\n".join(own)
    else:
        missing.append("no deployment of this user runs on this host")
    files["missing.txt"] = "\n".join(missing)
    return {name: redact(text) for name, text in files.items()}


def write_archive(path: str, files: Files) -> None:
    """Write the files to an archive that only its owner can read. Raises `ConfigError`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with (
            os.fdopen(descriptor, "wb") as stream,
            tarfile.open(fileobj=stream, mode="w:gz") as archive,
        ):
            for name, text in sorted(files.items()):
                data = text.encode(errors="backslashreplace")
                entry = tarfile.TarInfo(f"dynamo-report/{name}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {path}: {error.strerror}",
            hint="name a file in a folder that you can write",
        ) from None


def _read_report(deployment: Deployment, missing: list[str]) -> SupervisorReport:
    """Return what the supervisor knows of its processes, or an empty report."""
    try:
        return ask_supervisor(deployment.folder, "", CONTROL_TIMEOUT_S)
    except (DynamoError, OSError, ValueError) as error:
        missing.append(f"last lines, stacks and settings: {error or 'the supervisor is silent'}")
        return SupervisorReport()


def _ask_observer(
    records: Sequence[ProcessRecord], loaded: LoadedSettings, missing: list[str]
) -> Sequence[Mapping[str, Any]]:
    """Return the causes of late and failed requests of the last hour, with the worst of each."""
    keys, error = loaded.settings.server.api_keys, "no observer serves"
    for record in records:
        if record.role == "observer" and record.address:
            try:
                client = RouterClient(record.address, keys[0] if keys else "", CONTROL_TIMEOUT_S)
                return client.group_causes(3600)
            except DynamoError as failure:
                error = failure.message
    missing.append(f"the worst stories: {error}")
    return ()


def _of_processes(readings: Sequence[ProcessReading]) -> dict[str, str]:
    files = {
        "processes.json": _encode([reading.record for reading in readings]),
        "checks.json": _encode(list(check_readings(readings))),
    }
    for reading in readings:
        name = reading.record.name
        if reading.health:
            files[f"health/{name}.json"] = _encode(reading.health)
        if reading.metrics:
            files[f"metrics/{name}.txt"] = reading.metrics
        files[f"kernel/{name}.txt"] = "\n".join(_kernel_view(reading.record))
    return files


def _kernel_view(record: ProcessRecord) -> Iterator[str]:
    """Yield what the kernel tells of a process: its state, also while a signal has stopped it, what
    it waits for, and its limits."""
    for name in KERNEL_FILES:
        with suppress(OSError):
            text = Path(f"/proc/{record.pid}/{name}").read_text(errors="replace")
            yield f"== {name}\n{text}"


def _versions() -> Mapping[str, Any]:
    libraries: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    return {
        "dynamo": dynamo.__version__,
        "python": sys.version,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "libraries": libraries,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _origins(loaded: LoadedSettings) -> Mapping[str, Any]:
    """Return the settings of this command that are no defaults, with their origins."""
    return {
        setting.key: {"value": setting.value, "origin": setting.origin}
        for setting in effective_settings(loaded)
        if setting.origin != DEFAULT_ORIGIN
    }


def _encode(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode()
