"""`dynamo serve MODULE:Service`: a graph of services, each in its processes, one command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, config_path, load_settings, read_settings
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, Settings, SourcedValue

if TYPE_CHECKING:
    from dynamo.runtime.processes.child import ChildSpec
    from dynamo.runtime.processes.supervisor import Prepare
    from dynamo.services.deployment.plan import DeploymentPlan
    from dynamo.services.deployment.service_options import ServiceOptions

OPTION_PATTERN = re.compile(r"--([A-Z]\w*)\.([\w.-]+)(?:=(.*))?\Z", re.DOTALL)

EXAMPLES = """\
  cd examples/llm
  dynamo serve graphs.agg:Frontend -f configs/agg.yaml
  dynamo serve graphs.agg:Frontend -f configs/agg.yaml --AggregatedWorker.workers=2
  dynamo serve graphs.agg:AggregatedWorker -f configs/agg.yaml --model-path ./model
  dynamo serve graphs.agg:AggregatedWorker -f configs/agg.yaml --only
  dynamo serve graphs.agg:Frontend -f configs/agg.yaml --dry-run"""


def parser() -> Parser:
    """MODULE:Service, how much of its graph, and a flag for every setting that has one."""
    made = Parser(
        "dynamo serve",
        "Serve a graph of services: the named one and all that it depends on or is linked to.\n\n"
        "--SERVICE.OPTION=VALUE sets an option of one service, as its section of the file does;\n"
        "SERVICE.workers is how many replicas it has.",
        EXAMPLES,
        usage="MODULE:Service [-f FILE] [--only] [--dry-run] [--SERVICE.OPTION=VALUE] [FLAGS]",
    )
    made.add_argument("target", metavar="MODULE:Service", help="a class, found from this folder")
    made.add_argument("--only", action="store_true", help="this service alone, not its graph")
    made.add_argument(
        "--dry-run", action="store_true", help="print which processes and planes it comes to"
    )
    add_settings_flags(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Serve until stopped."""
    words, options = split_service_options(arguments)
    found = parser().parse(words)

    from dynamo.services.deployment.plan import plan_deployment
    from dynamo.services.deployment.user_service import load_service

    root = load_service(found.target, str(Path.cwd()))

    def load(extra: Mapping[str, SourcedValue]) -> LoadedSettings:
        return read_settings(found, extra=extra)

    def planned(base: LoadedSettings) -> DeploymentPlan:
        made = plan_deployment(root, base, load, options, only=found.only)
        check_plan(made)
        return made

    made = planned(load_settings(found))
    if found.dry_run:
        print("\n".join(describe_plan(made)))
        return 0
    return serve_plan(made, lambda: planned(load({})), found)


def split_service_options(arguments: Sequence[str]) -> tuple[list[str], ServiceOptions]:
    """The arguments without `--Service.option=value`, and those. Raises `ConfigError`."""
    words: list[str] = []
    options: dict[str, dict[str, SourcedValue]] = {}
    left = iter(arguments)
    for word in left:
        match = OPTION_PATTERN.match(word)
        if match is None:
            words.append(word)
            continue
        service, key, value = match.groups()
        if value is None and (value := next(left, None)) is None:
            raise ConfigError(f"{word} lacks its value", hint=f"write {word}=VALUE")
        options.setdefault(service, {})[key] = SourcedValue(value, f"flag --{service}.{key}")
    return words, options


def check_plan(made: DeploymentPlan) -> None:
    """What every start checks first. Raises `ConfigError`, `Unsupported`."""
    from dynamo.core.plugins import ENGINES
    from dynamo.telemetry.logs import parse_levels

    for part in made.with_role("worker"):
        ENGINES.check(part.settings.engine.kind)
    parse_levels(made.settings.logging.level)


def serve_plan(
    made: DeploymentPlan, again: Callable[[], DeploymentPlan], found: argparse.Namespace
) -> int:
    """Start all of it. `again` makes the plan anew, of what the settings have become."""
    from dynamo.cli.progress_bar import ProgressBar
    from dynamo.services.deployment.launch import SettingsSource
    from dynamo.services.deployment.plan import process_specs, serve_graph
    from dynamo.telemetry.logs import configure_logging

    settings = made.settings
    bar = ProgressBar(sys.stderr, as_logs=settings.logging.format == "json")
    configure_logging(settings.logging.level, settings.logging.format, "supervisor", bar)

    def read() -> tuple[Settings, Callable[[Settings], Sequence[ChildSpec]]]:
        now = again()
        return now.settings, partial(process_specs, now, target=found.target)

    source = SettingsSource(read, config_path(found))
    tell = partial(announce, made)
    return serve_graph(made, source, tell, prepare=_prepare_models(made, bar), logs=bar)


def announce(made: DeploymentPlan, url: str) -> None:
    """Tell that all serve, and how to try it."""
    from dynamo.cli import run as run_command
    from dynamo.cli.served_model import served_model_names

    settings = made.settings
    workers = made.with_role("worker")
    names = [name for part in workers for name in served_model_names(part.settings)] or [made.root]
    if settings.logging.format == "json":
        run_command.log_announcement(names, url)
    elif url and workers:
        run_command.announce(names, url)
    else:
        where = f" at {url}" if url else ""
        print(f"\n{made.root} serves{where}\n", file=sys.stderr)
        for endpoint in _user_endpoints(made)[:1]:
            print(f"try:  dynamo call {endpoint} JSON", file=sys.stderr)
        print("end:  Ctrl-C, or `dynamo stop`\n", file=sys.stderr, flush=True)


def describe_plan(made: DeploymentPlan) -> list[str]:
    """The plan, for people."""
    from dynamo.runtime.deployment import deployment_of
    from dynamo.runtime.planes import planes_of
    from dynamo.sdk.decorators import spec_of
    from dynamo.services.deployment.plan import with_deployment_name

    settings = with_deployment_name(made)
    deployment = deployment_of(settings)
    rows = [("PROCESS", "REPLICAS", "SERVICES", "ENDPOINTS")]
    for part in made.processes:
        specs = [spec_of(one) for one in part.services]
        names = ", ".join(spec.name for spec in specs)
        endpoints = ", ".join(
            f"{spec.namespace or settings.runtime.namespace}.{spec.component}.{endpoint.name}"
            for spec in specs
            for endpoint in spec.endpoints.values()
        )
        needs = "".join(f" {key}={value}" for key, value in part.resources.items())
        rows.append((part.name, str(part.replicas), names + needs, endpoints or "-"))
    lines = format_table(rows)
    lines += ["", f"deployment  {deployment.id}"]
    if made.serves_http:
        lines.append(f"http        {_http_url(settings)}")
    lines += [f"engine      {_engine_label(part.settings)}" for part in made.with_role("worker")]
    planes = planes_of(settings)
    lines.append(f"discovery   {planes.discovery}")
    lines.append(f"requests    {planes.requests}")
    lines.append(f"events      {planes.events}")
    return lines


def _user_endpoints(made: DeploymentPlan) -> list[str]:
    """Those of users' services, callers first."""
    from dynamo.sdk.decorators import spec_of

    namespace = made.settings.runtime.namespace
    return [
        f"{spec.namespace or namespace}.{spec.component}.{endpoint.name}"
        for part in made.with_role("service")
        for spec in map(spec_of, part.services)
        for endpoint in spec.endpoints.values()
    ]


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _http_url(settings: Settings) -> str:
    host = settings.server.http_host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.http_port}"


def _engine_label(settings: Settings) -> str:
    return f"{settings.engine.kind} {settings.model.path or '(the default model)'}"


def _prepare_models(made: DeploymentPlan, bar: object) -> Prepare | None:
    """Fetch the models of all workers, one after the other."""
    from dynamo.services.model_download import make_preparation

    wanted = [make_preparation(part.settings, bar) for part in made.with_role("worker")]  # type: ignore[arg-type]
    needed = [one for one in wanted if one is not None]
    if not needed:
        return None

    async def all_of_them(tell: object) -> None:
        for one in needed:
            await one(tell)  # type: ignore[arg-type]

    return all_of_them
