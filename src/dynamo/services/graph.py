"""A planned graph, started under a supervisor."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from dynamo.core.settings import Settings
from dynamo.runtime.supervisor import Prepare
from dynamo.services.launch import SettingsSource, serve, serve_without_http
from dynamo.services.plan import DeploymentPlan
from dynamo.telemetry.logs import LogStream


def with_deployment_name(made: DeploymentPlan) -> Settings:
    """The shared settings with the deployment's name: its port's where the graph serves models,
    else the root's."""
    settings = made.settings
    if settings.runtime.deployment or made.serves_models:
        return settings
    return replace(settings, runtime=replace(settings.runtime, deployment=made.root))


def serve_graph(
    made: DeploymentPlan,
    source: SettingsSource,
    on_ready: Callable[[str], None],
    *,
    prepare: Prepare | None = None,
    logs: LogStream | None = None,
) -> int:
    """Run it until it is stopped; returns the exit code. `source`: which processes there are, also
    for changes while it serves; `on_ready(url)` when all of it serves; the URL is "" where nothing
    speaks HTTP. Raises like `launch.serve`."""
    settings = with_deployment_name(made)
    _, specs = source.read()
    if made.serves_http:
        return serve(settings, on_ready, prepare=prepare, logs=logs, specs=specs, source=source)
    return serve_without_http(settings, specs, on_ready, prepare=prepare, logs=logs, source=source)
