"""A temporary deployment, and the configuration of the client that sends it the input."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from dynamo.cli.parsing import served_model_names
from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.settings import Settings
from dynamo_client import DynamoConfig

RETRIES = 6
RETRY_DELAY_S = 0.25

InputJob = Callable[[ProgressBar, DynamoConfig], Coroutine[Any, Any, int]]
"""Sends the input to the deployment of the configuration, and returns the exit code."""


def run_in_deployment(settings: Settings, prefix: str, job: InputJob) -> int:
    """Run a deployment, whose name begins with `prefix`, until `job` is done. Return the exit code
    of the first that ends. Raises the errors of both."""
    from dynamo.services.deployment.temporary import (
        run_with_temporary_deployment,
        temporary_settings,
    )
    from dynamo.services.model_store.preparation import make_preparation
    from dynamo.telemetry.logs import configure_logging
    from dynamo.telemetry.stderr import unblock_stderr

    settings = temporary_settings(settings, prefix)
    served_model_names(settings)
    bar = ProgressBar(unblock_stderr())
    configure_logging(settings.logging.level, settings.logging.format, "supervisor", bar)
    return run_with_temporary_deployment(
        settings,
        lambda url: job(bar, client_config(settings, url)),
        make_preparation([settings], bar),
        bar,
    )


def client_config(settings: Settings, url: str) -> DynamoConfig:
    """Return the configuration of a client of the deployment at `url`."""
    keys = settings.server.api_keys
    return DynamoConfig(
        url,
        api_key=keys[0] if keys else None,
        timeout=settings.server.request_timeout + 5,
        max_retries=RETRIES,
        retry_delay=RETRY_DELAY_S,
    )
