"""Whose routing is asked for: the flags that `dynamo explain` and `dynamo router` share."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from dynamo.operations.router_view import RouterClient

API_KEY_VARIABLE = "DYNAMO_API_KEY"


def add_router_flags(made: argparse.ArgumentParser) -> None:
    """`--url`, `--deployment`, `--api-key`."""
    made.add_argument("--url", help="HTTP port of a frontend or a router; else what runs here")
    made.add_argument("--deployment", metavar="NAME", help="its name or port, where several run")
    made.add_argument("--api-key", metavar="KEY", help=f"default: ${API_KEY_VARIABLE}")


def make_router_client(found: argparse.Namespace) -> RouterClient:
    """Raises `ConfigError`, `NotFound`."""
    from dynamo.operations.router_view import RouterClient

    url = _parse_url(found.url) if found.url else _deployment_url(found.deployment)
    return RouterClient(url, found.api_key or os.environ.get(API_KEY_VARIABLE, ""))


def _parse_url(text: str) -> str:
    from dynamo_client.config import parse_base_url

    try:
        parse_base_url(text)
    except ValueError:
        hint = "such as http://127.0.0.1:8000"
        raise ConfigError(f"--url: {text!r} is no URL", hint=hint) from None
    return text if "://" in text else f"http://{text}"


def _deployment_url(which: str | None) -> str:
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments

    (deployment,) = select_deployments(live_deployments(), which)
    for process in deployment.live_processes():
        if process.role in {"frontend", "router"} and process.address.startswith("http"):
            return process.address
    raise NotFound(f"{deployment.id} speaks no HTTP", hint="--url says where another one is")
