"""Whose routing is asked for: the flags that `dynamo explain` and `dynamo router` share."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from dynamo.operations.router_view import RouterPort

API_KEY = "DYNAMO_API_KEY"


def add_port(made: argparse.ArgumentParser) -> None:
    """`--url`, `--deployment`, `--api-key`."""
    made.add_argument("--url", help="HTTP port of a frontend or a router; else what runs here")
    made.add_argument("--deployment", metavar="NAME", help="its name or port, where several run")
    made.add_argument("--api-key", metavar="KEY", help=f"default: ${API_KEY}")


def port_of(found: argparse.Namespace) -> RouterPort:
    """Raises `ConfigError`, `NotFound`."""
    from dynamo.operations.router_view import RouterPort

    url = _with_scheme(found.url) if found.url else _running(found.deployment)
    return RouterPort(url, found.api_key or os.environ.get(API_KEY, ""))


def _with_scheme(text: str) -> str:
    from dynamo_client.config import locate

    try:
        locate(text)
    except ValueError:
        hint = "such as http://127.0.0.1:8000"
        raise ConfigError(f"--url: {text!r} is no URL", hint=hint) from None
    return text if "://" in text else f"http://{text}"


def _running(which: str | None) -> str:
    from dynamo.cli.stop import choose
    from dynamo.runtime.deployment import live_deployments

    (deployment,) = choose(live_deployments(), which)
    for process in deployment.processes():
        if process.role in {"frontend", "router"} and process.address.startswith("http"):
            return process.address
    raise NotFound(f"{deployment.id} speaks no HTTP", hint="--url says where another one is")
