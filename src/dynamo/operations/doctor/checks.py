"""Checks of this machine. Each check is a function that returns a finding and a remedy."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.core.errors import DynamoError, describe_os_error
from dynamo.core.installation import DISTRIBUTION, install_command
from dynamo.core.settings import Settings
from dynamo.core.settings.server_url import lacks_tokenizer
from dynamo.operations.running import fetch

Verdict = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 2 << 30
MIN_DISK_BYTES = 1 << 30
MIN_OPEN_FILES = 4096


class Finding(msgspec.Struct, frozen=True):
    """The result of one check, with the JSON keys check, verdict, found and hint. `hint` says how
    to fix a warning or failure."""

    check: str
    verdict: Verdict
    message: str = msgspec.field(name="found")
    hint: str = ""


Check = Callable[[Settings], Finding]


def run_checks(settings: Settings) -> Iterator[Finding]:
    """Run every check in order. An error inside a check becomes a failed finding."""
    for check in CHECKS:
        try:
            yield check(settings)
        except DynamoError as error:
            yield Finding(_check_name(check), "fail", error.message, error.hint or "")
        except OSError as error:
            yield Finding(_check_name(check), "fail", describe_os_error(error))
    yield from engines(settings)


def python(settings: Settings) -> Finding:
    """Check the interpreter's version and the operating system."""
    del settings
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] >= MIN_PYTHON and platform.system() == "Linux":
        return Finding("python", "ok", text)
    return Finding("python", "fail", f"{text} on {platform.system()}", "use Python 3.11+ on Linux")


def dependencies(settings: Settings) -> Finding:
    """Check that the required packages are installed, without those of extras."""
    del settings
    required = [line for line in metadata.requires(DISTRIBUTION) or () if "extra ==" not in line]
    names = [line.split(">")[0].split("=")[0].strip() for line in required]
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        text = f"missing: {', '.join(missing)}"
        return Finding("dependencies", "fail", text, install_command())
    return Finding("dependencies", "ok", f"all {len(names)} installed")


def cores(settings: Settings) -> Finding:
    """Check the number of usable CPU cores."""
    usable = len(os.sched_getaffinity(0))
    processes = settings.worker_count + settings.server.http_workers
    text = f"{usable} core{'s'[: usable > 1]} usable for {processes} processes"
    if usable < 2:
        return Finding("cores", "warn", text, "frontend and worker will share one core")
    return Finding("cores", "ok", text)


def memory(settings: Settings) -> Finding:
    """Check the memory available for weights and KV blocks."""
    del settings
    from dynamo.inference.native.engine_sizing import available_memory_bytes

    free = available_memory_bytes()
    verdict: Verdict = "ok" if free >= MIN_MEMORY_BYTES else "warn"
    hint = "" if verdict == "ok" else "the default model needs about 1 GB; lower --num-blocks"
    return Finding("memory", verdict, f"{free / 1e9:.1f} GB available", hint)


def open_files(settings: Settings) -> Finding:
    """Check the limit of open files, which bounds the number of connections. Each process raises
    its soft limit to the hard limit."""
    needed = max(MIN_OPEN_FILES, settings.server.max_concurrent_requests + 256)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard >= needed:
        return Finding("open files", "ok", f"hard limit {hard}")
    return Finding("open files", "warn", f"hard limit {hard}", f"ulimit -Hn {needed}")


def state_folder(settings: Settings) -> Finding:
    """Check that the folder of the deployments' state is writable."""
    from dynamo.runtime.deployment import deployment_of

    deployment = deployment_of(settings)
    parent = _nearest_existing_folder(deployment.folder)
    if not os.access(parent, os.W_OK):
        hint = "set XDG_RUNTIME_DIR to a folder that you can write"
        return Finding("state folder", "fail", f"{parent} is not writable", hint)
    return Finding("state folder", "ok", str(deployment.folder.parent))


def cache_folder(settings: Settings) -> Finding:
    """Check the free space of the folder for models and verification results."""
    del settings
    from dynamo.models.file_cache import cache_dir

    folder = cache_dir()
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES:
        return Finding("cache folder", "warn", f"{folder}: {free / 1e9:.1f} GB free", "free space")
    return Finding("cache folder", "ok", f"{folder}, {free / 1e9:.0f} GB free")


def model(settings: Settings) -> Finding:
    """Check whether the files of each model are on this machine, or can be fetched by name."""
    findings = [_model(each) for each in settings.each_model]
    if len(findings) == 1:
        return findings[0]
    verdicts = [finding.verdict for finding in findings]
    hints = dict.fromkeys(finding.hint for finding in findings if finding.hint)
    text = "; ".join(finding.message for finding in findings)
    return Finding("model", "warn" if "warn" in verdicts else "ok", text, "; ".join(hints))


def _model(settings: Settings) -> Finding:
    from dynamo.models.location import locate_model

    if lacks_tokenizer(settings):
        return Finding("model", "ok", "the servers' model, without its tokenizer")
    location = locate_model(settings.model.path)
    name = settings.model.path or location.name
    if location.path is not None:
        return Finding("model", "ok", f"{name} is on this machine")
    hint = "downloaded on first use; offline, give a GGUF file or a model folder"
    return Finding("model", "warn", f"{name} is not on this machine", hint)


def port(settings: Settings) -> Finding:
    """Check that the HTTP port is free, or that the deployment of these settings has it."""
    from dynamo.communication.addresses import is_loopback
    from dynamo.communication.http.errors import PortInUse
    from dynamo.runtime.processes.ports import check_port_free, find_process, port_owner

    server = settings.server
    try:
        check_port_free(server.http_host, server.http_port)
    except PortInUse:
        record = find_process(server.http_port, port_owner(server.http_port))
        if record is None or settings.runtime.deployment not in ("", record.deployment):
            raise
        text = f"deployment {record.deployment} (process {record.pid}) serves there"
        return Finding("port", "ok", f"{server.http_host}:{server.http_port}: {text}")
    text = f"{server.http_host}:{server.http_port} is free"
    if not (is_loopback(server.http_host) or server.api_keys):
        hint = "every client that reaches it may use it: set server.api_keys"
        return Finding("port", "warn", text, hint)
    return Finding("port", "ok", text)


def loopback(settings: Settings) -> Finding:
    """Check that processes can reach each other on 127.0.0.1."""
    del settings
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=2),
    ):
        pass
    return Finding("loopback", "ok", "127.0.0.1 answers")


def routing(settings: Settings) -> Finding:
    """Check how the router of a running deployment knows its workers' caches."""
    from dynamo.runtime.deployment import deployment_of, live_deployments

    deployment = deployment_of(settings)
    addresses = {process.role: process.address for process in deployment.live_processes()}
    address = addresses.get("frontend", "")
    if not address.startswith("http://"):
        text = f"mode {settings.router.mode}; no frontend of {deployment.id} runs"
        others = [other.id for other in live_deployments() if other.id != deployment.id]
        hint = f"--deployment checks another: {', '.join(others)}" if others else ""
        return Finding("routing", "ok", text, hint)
    health = _fetch_health(address)
    refused = health.get("refused_workers") or {}
    if refused:
        worker, reason = next(iter(refused.items()))
        text = f"workers refused: {len(refused)}, of which {worker}: {reason}"
        hint = "start every worker of a model with the same model and the same --block-size"
        return Finding("routing", "fail", text, hint)
    router = addresses.get("router", "")  # a router process has the index instead of the frontend
    if router.startswith("http://"):
        health = _fetch_health(router)
    views = health.get("routing") or {}
    modes = Counter(mode for view in views.values() for mode in view.values())
    if not modes:
        return Finding("routing", "ok", f"{address}: does not use the workers' caches")
    counts = (f"cache view of {count} workers: {mode}" for mode, count in modes.items())
    text = f"{address}: {', '.join(counts)}"
    if modes["approximate"]:
        hint = "approximate workers send no KV events; their cache hits are estimates"
        return Finding("routing", "warn", text, hint)
    if modes["no prefix cache"]:
        hint = "set engine.prefix_caching, or use another mode than kv"
        return Finding("routing", "warn", text, hint)
    return Finding("routing", "ok", text)


def namespace(settings: Settings) -> Finding:
    """Check that frontends follow the namespace in which running workers serve."""
    from dynamo.runtime.deployment import deployment_of

    for process in deployment_of(settings).live_processes():
        if process.role not in {"supervisor", "frontend"} and process.status_url:
            limitations = _fetch_health(process.status_url).get("limitations") or {}
            if text := limitations.get("namespace"):
                hint = "give workers and frontends the same --namespace"
                return Finding("namespace", "warn", text, hint)
    return Finding("namespace", "ok", settings.runtime.namespace)


def planes(settings: Settings) -> Finding:
    """Check that other users and hosts cannot use or alter the connections between processes."""
    from dynamo.runtime.planes import UNENCRYPTED_HINT, UNENCRYPTED_TEXT, planes_of

    chosen = planes_of(settings)
    if chosen.unencrypted:
        return Finding("planes", "warn", UNENCRYPTED_TEXT, UNENCRYPTED_HINT)
    if chosen.open_to_other_users:
        text = "every user of this host can call the workers and follow their events"
        return Finding("planes", "warn", text, "set the same security.secret in all processes")
    return Finding("planes", "ok", ", ".join(chosen.redacted_urls().values()))


def servers(settings: Settings) -> Finding:
    """Check what the planes need of etcd, NATS and Kubernetes, where they are set: library,
    connection, credentials, secret."""
    from dynamo.runtime.planes import planes_of

    chosen = planes_of(settings)
    urls = (chosen.discovery, chosen.requests, chosen.events)
    if not any(url.startswith(("etcd", "nats", "kubernetes")) for url in urls):
        return Finding("servers", "ok", "none is needed")
    import asyncio

    from dynamo.operations.doctor.kubernetes import check_kubernetes
    from dynamo.operations.doctor.planes import check_plane_servers

    text = ""
    if chosen.discovery.startswith("kubernetes"):
        text = f"{asyncio.run(check_kubernetes(chosen.discovery))}; "
    return Finding("servers", "ok", text + asyncio.run(check_plane_servers(settings)))


def transfer(settings: Settings) -> Finding:
    """Check how workers would pull KV blocks of each other."""
    import asyncio

    from dynamo.operations.doctor.planes import check_transfer

    text, reachable = asyncio.run(check_transfer(settings))
    if reachable:
        return Finding("transfer", "ok", text)
    hint = "give all workers the same security.secret and --transfer-plane; for other hosts, "
    return Finding("transfer", "warn", text, f"{hint}listen beyond loopback (--plane-host)")


def engines(settings: Settings) -> Iterator[Finding]:
    """Check the packages of all engines that are not part of Dynamo, without importing them.

    An engine that the settings name must be usable. Others may be missing.
    """
    from dynamo.inference.engines.packages import ENGINE_PACKAGES, engine_status, package_kind

    wanted = package_kind(settings.engine.kind)
    for kind, package in ENGINE_PACKAGES.items():
        status, chosen = engine_status(kind), kind == wanted
        name = f"engine {kind}"
        if not status.problem:
            text = f"{package.title} {status.version} is usable; supported: {package.supported}"
            yield Finding(name, "ok", text)
        elif chosen or status.is_installed:
            verdict: Verdict = "fail" if chosen else "warn"
            yield Finding(name, verdict, status.problem, status.command)
        else:
            yield Finding(name, "ok", status.problem)


CHECKS: Sequence[Check] = (
    python, dependencies, cores, memory, open_files, loopback, state_folder, cache_folder, model,
    port, planes, servers, transfer, routing, namespace,
)  # fmt: skip


def _fetch_health(url: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(fetch(url, "/health"), type=dict[str, Any])
    except (HTTPException, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OSError(f"{url}/health failed: {error}") from error


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _check_name(check: Check) -> str:
    return check.__name__.replace("_", " ")


def _nearest_existing_folder(folder: Path) -> Path:
    while not os.path.exists(folder):  # noqa: PTH110 - False also for unreadable folders
        folder = folder.parent
    return folder
