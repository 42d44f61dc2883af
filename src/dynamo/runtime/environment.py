"""The settings of a process that no command line starts: environment and configuration file."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings, resolve_settings
from dynamo.core.settings.secret_files import SecretFile
from dynamo.runtime.planes import DEFAULT_NATS_URL

CONFIG_PATH_VARIABLE: Final = "DYNAMO_CONFIG_PATH"
MAX_SECRET_FILE_BYTES: Final = 1 << 20


DYN_NAMES: Final = {
    "DYN_NAMESPACE": "DYNAMO_RUNTIME__NAMESPACE",
    "DYN_SYSTEM_HOST": "DYNAMO_RUNTIME__STATUS_HOST",
    "DYN_SYSTEM_PORT": "DYNAMO_RUNTIME__STATUS_PORT",
    "DYN_TCP_RPC_HOST": "DYNAMO_RUNTIME__PLANE_HOST",
}
"""Names of NVIDIA Dynamo's environment variables, and those of this project with their values."""


def environment_settings(
    discovery: str = "", requests: str = "", variables: Mapping[str, str] | None = None
) -> Settings:
    """Load the settings of `DYNAMO_...` variables and of the file that `DYNAMO_CONFIG_PATH` names,
    and those of `with_dyn_names`. `variables` win over those of the environment.

    Blocks. Raises `ConfigError`.
    """
    path = os.environ.get(CONFIG_PATH_VARIABLE, "")
    document = read_config_file(path) if path else None
    environ = with_dyn_names({**os.environ, **(variables or {})}, discovery, requests)
    return resolve_settings({}, environ, document, read_secret_file).settings


def with_dyn_names(
    environ: Mapping[str, str], discovery: str = "", requests: str = ""
) -> Mapping[str, str]:
    """Return the environment with the `DYNAMO_...` variables that stand for NVIDIA Dynamo's
    `DYN_...` ones. Variables that are set already have precedence. Raises `ConfigError`.

    `discovery` and `requests` are the backends that a program names: `DYN_DISCOVERY_BACKEND` and
    `DYN_REQUEST_PLANE` replace them. The discovery of etcd without `ETCD_ENDPOINTS` is that of
    this project, which needs no server.
    """
    names = {name: environ[dyn] for dyn, name in DYN_NAMES.items() if environ.get(dyn)}
    if names.get("DYNAMO_RUNTIME__STATUS_PORT", "").startswith("-"):  # -1: no port
        del names["DYNAMO_RUNTIME__STATUS_PORT"]
    backend = environ.get("DYN_DISCOVERY_BACKEND") or discovery or "etcd"
    endpoints, folder = environ.get("ETCD_ENDPOINTS"), environ.get("DYN_FILE_KV")
    if backend not in {"etcd", "file", "mem", "kubernetes"}:
        raise ConfigError(
            f"the discovery backend {backend!r} of NVIDIA Dynamo does not exist here",
            hint="use kubernetes, etcd with ETCD_ENDPOINTS, or file with DYN_FILE_KV",
        )
    if backend == "mem":
        names["DYNAMO_RUNTIME__DISCOVERY"] = "memory:dynamo"
    elif backend == "kubernetes":
        names["DYNAMO_RUNTIME__DISCOVERY"] = "kubernetes:"
    elif backend == "etcd" and endpoints:
        names["DYNAMO_ETCD_ENDPOINTS"] = endpoints
    elif folder:
        names["DYNAMO_RUNTIME__DISCOVERY"] = f"file:{Path(folder).absolute()}"
    nats = environ.get("NATS_SERVER", DEFAULT_NATS_URL)
    if (environ.get("DYN_REQUEST_PLANE") or requests) == "nats":
        names["DYNAMO_NATS_URL"] = nats
    elif environ.get("DYN_EVENT_PLANE") == "nats":
        names["DYNAMO_RUNTIME__EVENTS"] = nats
    return {**names, **environ}


def read_config_file(path: str) -> tuple[str, str]:
    """Return text and name of a configuration file. Raises `ConfigError`."""
    try:
        return Path(path).read_text(encoding="utf-8"), path
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"configuration file {path}: {reason}",
            hint=f"check --config and ${CONFIG_PATH_VARIABLE}",
        ) from None


def read_secret_file(path: str) -> SecretFile:
    """Read the file of a secret. Raises `OSError`, `ValueError` and `RuntimeError`."""
    with Path(path).expanduser().open("rb") as file:
        content = file.read(MAX_SECRET_FILE_BYTES + 1)
        mode = os.fstat(file.fileno()).st_mode
    if len(content) > MAX_SECRET_FILE_BYTES:
        raise ValueError(f"the file is longer than {MAX_SECRET_FILE_BYTES:,} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8 text") from None
    if not text.strip():
        raise ValueError("the file is empty")
    return SecretFile(text, stat.S_ISREG(mode) and bool(mode & stat.S_IROTH))
