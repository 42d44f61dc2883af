"""`dynamo serve MODULE:Service`: serve a graph of services, each in its own processes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.cli.engine_check import check_engines
from dynamo.cli.parsing import Parser, format_table, served_model_names
from dynamo.cli.settings_flags import (
    add_settings_flags,
    config_path,
    load_settings,
    read_settings,
    settings_files,
)
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, Settings, SourcedValue

if TYPE_CHECKING:
    from dynamo.runtime.processes.child_spec import ChildSpec
    from dynamo.services.deployment.plan import DeploymentPlan
    from dynamo.services.deployment.service_options import ServiceOptions

OPTION_PATTERN = re.compile(r"--([A-Z]\w*)\.([\w.-]+)(?:=(.*))?\Z", re.DOTALL)

EXAMPLES = """\
  dynamo serve hello:Greeter
  dynamo serve graphs.agg:Frontend -f serve.yaml
  dynamo serve graphs.agg:Frontend -f serve.yaml --AggregatedWorker.workers=2
  dynamo serve graphs.agg:AggregatedWorker -f serve.yaml --model-path ./model
  dynamo serve graphs.agg:AggregatedWorker -f serve.yaml --only
  dynamo serve graphs.agg:Frontend -f serve.yaml --dry-run"""


def parser() -> Parser:
    """Return the parser: MODULE:Service, the part of the graph, and the settings' flags."""
    parser = Parser(
        "dynamo serve",
        "Serve a graph: the named service and all services that it depends on or is linked to.\n\n"
        "--SERVICE.OPTION=VALUE sets an option of one service, like its section of the file.\n"
        "SERVICE.workers is its number of replicas.",
        EXAMPLES,
        usage="MODULE:Service [-f FILE] [--only] [--dry-run] [--SERVICE.OPTION=VALUE] [FLAGS]",
    )
    parser.add_argument(
        "target", metavar="MODULE:Service", help="a class, imported from this folder"
    )
    parser.add_argument("--only", action="store_true", help="this service without its graph")
    parser.add_argument("--dry-run", action="store_true", help="print the processes and planes")
    add_settings_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Serve until stopped."""
    words, options = split_service_options(arguments)
    args = parser().parse(words)

    from dynamo.services.deployment.plan import plan_deployment
    from dynamo.services.deployment.user_service import load_service

    root = load_service(args.target, str(Path.cwd()))

    def load(extra: Mapping[str, SourcedValue]) -> LoadedSettings:
        return read_settings(args, extra=extra)

    def make_plan(base: LoadedSettings) -> DeploymentPlan:
        plan = plan_deployment(root, base, load, options, only=args.only)
        check_plan(plan, base.origins, elsewhere=args.dry_run)
        return plan

    plan = make_plan(load_settings(args))
    if args.dry_run:
        print("\n".join(describe_plan(plan)))
        return 0
    return serve_plan(plan, lambda: make_plan(load({})), args)


def split_service_options(arguments: Sequence[str]) -> tuple[list[str], ServiceOptions]:
    """Split arguments into words and options of the form `--Service.option=value`. Raises
    `ConfigError` for an option without a value."""
    words: list[str] = []
    options: dict[str, dict[str, SourcedValue]] = {}
    remaining = iter(arguments)
    for word in remaining:
        match = OPTION_PATTERN.match(word)
        if match is None:
            words.append(word)
            continue
        service, key, value = match.groups()
        if value is None and (value := next(remaining, None)) is None:
            raise ConfigError(f"{word} has no value", hint=f"write {word}=VALUE")
        options.setdefault(service, {})[key] = SourcedValue(value, f"flag --{service}.{key}")
    return words, options


def check_plan(
    plan: DeploymentPlan, origins: Mapping[str, str], *, elsewhere: bool = False
) -> None:
    """Check engines, log level and planes. Raises `ConfigError` and `Unsupported`. See
    `check_engines` for plans that start `elsewhere`."""
    from dynamo.runtime.planes import planes_of
    from dynamo.telemetry.logs import parse_levels

    parts = [part.settings for part in plan.with_role("worker")]
    for note in check_engines(parts, origins, elsewhere=elsewhere):
        print(f"note: {note}", file=sys.stderr)
    parse_levels(plan.settings.logging.level)
    planes_of(plan.settings)


def serve_plan(
    plan: DeploymentPlan, reload_plan: Callable[[], DeploymentPlan], args: argparse.Namespace
) -> int:
    """Serve the plan until it is stopped. `reload_plan` makes a plan from the present settings."""
    from dynamo.cli.progress_bar import ProgressBar
    from dynamo.services.deployment.launch import SettingsSource, serve
    from dynamo.services.deployment.plan import process_specs, with_deployment_name
    from dynamo.services.model_store.preparation import make_preparation
    from dynamo.telemetry.log_output import open_log_output
    from dynamo.telemetry.logs import configure_logging

    settings = plan.settings
    bar = ProgressBar(
        open_log_output(settings.logging.output), as_logs=settings.logging.format == "json"
    )
    configure_logging(settings.logging.level, settings.logging.format, "supervisor", bar)

    def read() -> tuple[Settings, Callable[[Settings], Sequence[ChildSpec]]]:
        reloaded = reload_plan()
        return reloaded.settings, partial(process_specs, reloaded)

    return serve(
        with_deployment_name(plan),
        partial(announce, plan),
        prepare=make_preparation([part.settings for part in plan.with_role("worker")], bar),
        logs=bar,
        specs=partial(process_specs, plan),
        source=SettingsSource(read, settings_files(args), settings, config_path(args)),
        http=plan.serves_http,
    )


def announce(plan: DeploymentPlan, url: str) -> None:
    """Print that the deployment serves, with an example command."""
    from dynamo.cli import run as run_command

    settings = plan.settings
    workers = plan.with_role("worker")
    served = (name for part in workers for name in served_model_names(part.settings))
    names = list(dict.fromkeys(served)) or [plan.root]
    if settings.logging.format == "json":
        run_command.log_announcement(names, url)
    elif url and workers:
        run_command.announce(names, workers[0].settings, url)
    else:
        where = f" at {url}" if url else ""
        print(f"\n{plan.root} serves{where}\n", file=sys.stderr)
        for endpoint in _user_endpoints(plan)[:1]:
            print(f"try:  dynamo call {endpoint} JSON", file=sys.stderr)
        print("end:  Ctrl-C, or `dynamo stop`\n", file=sys.stderr, flush=True)


def describe_plan(plan: DeploymentPlan) -> list[str]:
    """Return the plan as lines of text."""
    from dynamo.runtime.deployment import deployment_of
    from dynamo.runtime.planes import planes_of
    from dynamo.sdk.decorators import spec_of
    from dynamo.services.deployment.plan import with_deployment_name

    settings = with_deployment_name(plan)
    deployment = deployment_of(settings)
    rows = [("PROCESS", "REPLICAS", "SERVICES", "ENDPOINTS")]
    for part in plan.processes:
        names = ", ".join(spec_of(service).name for service in part.services)
        endpoints = ", ".join(_endpoint_names(part.services, settings.runtime.namespace))
        needs = "".join(f" {key}={value}" for key, value in part.resources.items())
        rows.append((part.name, str(part.replicas), names + needs, endpoints or "-"))
    lines = format_table(rows)
    lines += ["", f"deployment  {deployment.id}"]
    if plan.serves_http:
        lines.append(f"http        {_http_url(settings)}")
    for part in plan.with_role("worker"):
        path = part.settings.model.path or "(the default model)"
        lines.append(f"engine      {part.settings.engine.kind} {path}")
    planes = planes_of(settings)
    lines.append(f"discovery   {planes.discovery}")
    lines.append(f"requests    {planes.requests}")
    lines.append(f"events      {planes.events}")
    lines.append(f"transfer    {planes.transfer}")
    return lines


def _user_endpoints(plan: DeploymentPlan) -> list[str]:
    """Return the full names of the user services' endpoints, callers first."""
    namespace = plan.settings.runtime.namespace
    parts = plan.with_role("service")
    return [name for part in parts for name in _endpoint_names(part.services, namespace)]


def _endpoint_names(services: Iterable[type], namespace: str) -> list[str]:
    from dynamo.sdk.decorators import spec_of

    return [
        f"{spec.namespace or namespace}.{spec.component}.{endpoint.name}"
        for spec in map(spec_of, services)
        for endpoint in spec.endpoints.values()
    ]


def _http_url(settings: Settings) -> str:
    host = settings.server.http_host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.http_port}"
