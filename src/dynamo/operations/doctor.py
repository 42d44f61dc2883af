"""Checks of this machine: each a function that says what it found and what would mend it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from dynamo.core.errors import DynamoError, describe_os_error
from dynamo.core.settings import Settings

Verdict = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 2 << 30
MIN_DISK_BYTES = 1 << 30
MIN_OPEN_FILES = 4096
HEALTH_TIMEOUT_S = 2.0


class Finding(msgspec.Struct, frozen=True):
    """What one check found; `hint`: what would mend it."""

    check: str
    verdict: Verdict
    found: str
    hint: str = ""


Check = Callable[[Settings], Finding]


def run_checks(settings: Settings) -> Iterator[Finding]:
    """Every check, in order. A check that fails by itself is a finding too."""
    for check in CHECKS:
        try:
            yield check(settings)
        except DynamoError as error:
            yield Finding(_check_name(check), "fail", error.message, error.hint or "")
        except OSError as error:
            yield Finding(_check_name(check), "fail", describe_os_error(error))


def python(settings: Settings) -> Finding:
    """The interpreter."""
    del settings
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] >= MIN_PYTHON and platform.system() == "Linux":
        return Finding("python", "ok", found)
    return Finding("python", "fail", f"{found} on {platform.system()}", "Python 3.11+ on Linux")


def dependencies(settings: Settings) -> Finding:
    """What pyproject.toml declares, without the extras, is installed."""
    del settings
    wanted = [name for name in metadata.requires("dynamo-python") or () if "extra ==" not in name]
    names = [name.split(">")[0].split("=")[0].strip() for name in wanted]
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        return Finding("dependencies", "fail", f"missing: {', '.join(missing)}", "pip install .")
    return Finding("dependencies", "ok", f"all {len(names)} installed")


def cores(settings: Settings) -> Finding:
    """Cores, for the native engine."""
    usable = len(os.sched_getaffinity(0))
    processes = settings.engine.workers + settings.server.http_workers
    if usable < 2:
        return Finding("cores", "warn", f"{usable}", "frontend and worker will share one core")
    return Finding("cores", "ok", f"{usable} usable, {processes} processes wanted")


def memory(settings: Settings) -> Finding:
    """Memory that is free for weights and KV blocks."""
    del settings
    free = _available_bytes()
    verdict: Verdict = "ok" if free >= MIN_MEMORY_BYTES else "warn"
    hint = "" if verdict == "ok" else "the default model wants about 1 GB; use --num-blocks"
    return Finding("memory", verdict, f"{free / 1e9:.1f} GB available", hint)


def open_files(settings: Settings) -> Finding:
    """The limit of connections."""
    wanted = max(MIN_OPEN_FILES, settings.server.max_concurrent_requests + 256)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return Finding("open files", "ok", f"limit {soft}")
    return Finding("open files", "warn", f"limit {soft}, hard {hard}", f"ulimit -n {wanted}")


def state_folder(settings: Settings) -> Finding:
    """Where deployments keep their state."""
    from dynamo.runtime.deployment import deployment_of

    deployment = deployment_of(settings)
    parent = _nearest_existing_folder(deployment.folder)
    if not os.access(parent, os.W_OK):
        hint = "set XDG_RUNTIME_DIR to a folder of your own"
        return Finding("state folder", "fail", f"{parent} is not writable", hint)
    return Finding("state folder", "ok", str(deployment.folder.parent))


def cache_folder(settings: Settings) -> Finding:
    """Where models and proofs are kept, and its room."""
    del settings
    from dynamo.models.file_cache import cache_dir

    folder = cache_dir()
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES:
        return Finding("cache folder", "warn", f"{folder}: {free / 1e9:.1f} GB free", "make room")
    return Finding("cache folder", "ok", f"{folder}, {free / 1e9:.0f} GB free")


def model(settings: Settings) -> Finding:
    """Whether the default model is here already."""
    from dynamo.models.downloads.default_model import DEFAULT_MODEL, cached_default_model

    path = Path(settings.model.path).expanduser() if settings.model.path else cached_default_model()
    name = settings.model.path or DEFAULT_MODEL.name
    if path is not None and path.exists():
        return Finding("model", "ok", f"{name} is here")
    hint = "fetched on first use; offline, give a GGUF file or a model folder"
    return Finding("model", "warn", f"{name} is not here yet", hint)


def port(settings: Settings) -> Finding:
    """Whether the HTTP port is free."""
    from dynamo.runtime.processes.ports import check_port_free

    server = settings.server
    check_port_free(server.http_host, server.http_port)
    return Finding("port", "ok", f"{server.http_host}:{server.http_port} is free")


def loopback(settings: Settings) -> Finding:
    """Whether processes can reach each other."""
    del settings
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=2),
    ):
        pass
    return Finding("loopback", "ok", "127.0.0.1 answers")


def routing(settings: Settings) -> Finding:
    """How the deployment, if it runs, knows its workers' caches."""
    from dynamo.runtime.deployment import deployment_of, live_deployments

    asked_for = deployment_of(settings)
    addresses = {one.role: one.address for one in asked_for.live_processes()}
    address = addresses.get("frontend", "")
    if not address.startswith("http://"):
        found = f"mode {settings.router.mode}; no frontend of {asked_for.id} runs"
        others = ", ".join(one.id for one in live_deployments() if one.id != asked_for.id)
        hint = f"--deployment looks at another: {others}" if others else ""
        return Finding("routing", "ok", found, hint)
    told = _fetch_health(address)
    refused = told.get("refused_workers") or {}
    if refused:
        worker, why = next(iter(refused.items()))
        found = f"workers refused: {len(refused)}, of which {worker}: {why}"
        hint = "start every worker of a model with the same model and the same --block-size"
        return Finding("routing", "fail", found, hint)
    asked = addresses.get("router", "")  # where there is one, it knows the caches
    views = (_fetch_health(asked) if asked.startswith("http://") else told).get("routing") or {}
    modes = Counter(mode for view in views.values() for mode in view.values())
    if not modes:
        return Finding("routing", "ok", f"{address}: not by what workers have cached")
    found = f"{address}: " + ", ".join(f"{count} workers {mode}" for mode, count in modes.items())
    if modes["approximate"]:
        return Finding("routing", "warn", found, "those send no KV events: hits are guessed")
    if modes["no prefix cache"]:
        hint = "nothing is found again there: engine.prefix_caching, or another mode than kv"
        return Finding("routing", "warn", found, hint)
    return Finding("routing", "ok", found)


CHECKS: Sequence[Check] = (
    python,
    dependencies,
    cores,
    memory,
    open_files,
    loopback,
    state_folder,
    cache_folder,
    model,
    port,
    routing,
)


def _fetch_health(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        found: dict[str, Any] = msgspec.json.decode(connection.getresponse().read(), type=dict)
    except (HTTPException, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OSError(f"{url} gives no /health: {error}") from error
    finally:
        connection.close()
    return found


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _check_name(check: Check) -> str:
    return check.__name__.replace("_", " ")


def _nearest_existing_folder(folder: Path) -> Path:
    while not os.path.exists(folder):  # noqa: PTH110 - False also where we may not look
        folder = folder.parent
    return folder
