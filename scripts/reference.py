#!/usr/bin/env python3
"""Write docs/reference, CRDs, dashboards and alert rules from the code; --check compares them."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from dashboards import monitoring_files
from kubernetes_files import kubernetes_files

import dynamo
from dynamo.application import http_errors
from dynamo.application.embeddings import EmbeddingBody, RerankBody, ScoreBody
from dynamo.application.messages.body import MessagesBody
from dynamo.application.observer import PATHS
from dynamo.application.openai.chat import ChatBody
from dynamo.application.openai.completions import CompletionBody
from dynamo.application.openai.generation_body import Neutral
from dynamo.application.responses.body import ResponsesBody
from dynamo.cli.commands import COMMANDS, command_parser
from dynamo.cli.entry import overview
from dynamo.core.errors import DynamoError
from dynamo.core.settings import SettingSpec
from dynamo.core.settings.keys import environment_name, section_descriptions, setting_specs_by_key
from dynamo.core.settings.load import ENVIRONMENT_ALIASES
from dynamo.core.settings.values import type_name

ROOT = Path(__file__).parents[1]
MADE = "Made by scripts/reference.py from the code (`make docs`)"
HELP_COLUMNS = "100"
METRIC_KINDS = frozenset({"counter", "gauge", "histogram"})


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or compare them. Returns 1 if one is out of date."""
    rendered = pages()
    if "--check" in arguments:
        return _compare(rendered)
    for name, text in rendered.items():
        (ROOT / name).write_text(text, encoding="utf-8")
    return 0


def _compare(rendered: Mapping[str, str]) -> int:
    stale = [name for name, text in rendered.items() if not _same(ROOT / name, text)]
    for name in stale:
        print(f"{name} is out of date: run `make docs`")
        print("\n".join(_difference(ROOT / name, rendered[name])))
    return 1 if stale else 0


def pages() -> Mapping[str, str]:
    """Return the text of every page, manifest, dashboard and rules file, by path."""
    makers = (settings_page, commands_page, errors_page, metrics_page, http_page)
    pages = {f"docs/reference/{make.__name__[:-5]}.md": make() for make in makers}
    return pages | kubernetes_files(MADE) | monitoring_files(MADE)


def settings_page() -> str:
    """Return the page of settings, with a table for each section."""
    parts = [_title("Settings")]
    parts.append(
        "A flag takes precedence over the environment, the environment over the file named by "
        "`--config` or `DYNAMO_CONFIG_PATH`, the file over the default. Every setting has a flag "
        "`--SECTION.KEY VALUE`. Sizes take units (`8GB` = 8·10⁹, `16Gi` = 16·2³⁰ bytes), and so do "
        "durations (`15s`, `2m`, `300ms`); numbers without a unit are in the unit shown. In names "
        "and modes, `-` and `_` are equal. An unknown key is an error that names the nearest key. "
        "`dynamo config explain FILE` prints every effective value and its origin. Settings take "
        "effect at a start. Those **changed while serving** also take effect when the file is "
        "written or the supervisor gets SIGHUP.\n"
    )
    short = ", ".join(f"`{name}` (`{key}`)" for name, key in ENVIRONMENT_ALIASES.items())
    parts.append(f"Short names in the environment: {short}, `DYNAMO_CONFIG_PATH` (the file).\n")
    specs = setting_specs_by_key().values()
    for section, description in section_descriptions().items():
        parts.append(f"## {section}\n\n{description}\n")
        rows = [_setting_row(spec) for spec in specs if spec.key.partition(".")[0] == section]
        parts.append(_table(SETTING_COLUMNS, rows))
    for spec in specs:
        if spec.entry_schema is not None:
            parts.append(f"## {spec.key}[]\n\nA list; {spec.meta.help}. Each entry:\n")
            entry_specs = setting_specs_by_key(spec.entry_schema).values()
            hidden = ("engine.", "cache.") if spec.key == "models" else ()
            rows = [_setting_row(e, spec.key) for e in entry_specs if not e.key.startswith(hidden)]
            parts.append(_table(SETTING_COLUMNS, rows))
    return "\n".join(parts)


SETTING_COLUMNS = ("setting", "type", "default", "flag", "meaning")


def _setting_row(spec: SettingSpec, entry_of: str = "") -> Sequence[str]:
    meta = spec.meta
    kind = type_name(spec) + (f", {meta.unit}" if meta.unit else "")
    notes = [meta.help]
    if meta.choices:
        notes.append(f"one of {', '.join(f'`{choice}`' for choice in meta.choices)}")
    if meta.ge is not None or meta.le is not None:
        notes.append(_bounds(meta.ge, meta.le))
    if meta.reload:
        notes.append("**changed while serving**")
    if meta.unused:
        notes.append("**not in use yet**")
    if meta.not_yet:
        words = ", ".join(f"`{word}`" for word, _ in meta.not_yet)
        notes.append(f"not in use yet: {words}")
    if meta.aliases:
        notes.append(f"also {', '.join(f'`{alias}`' for alias in meta.aliases)}")
    if meta.secret:
        notes.append("never shown")
    name = f"`{spec.key}`" if entry_of else f"`{spec.key}`<br>`{environment_name(spec.key)}`"
    flag = f"`{meta.flag}`" if meta.flag else ""
    return name, kind, _format_default(spec.default), flag, "; ".join(notes)


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"


def _format_default(default: Any) -> str:
    if default is None or default in ("", (), {}):
        return ""
    return f"`{', '.join(map(str, default)) if isinstance(default, tuple) else default}`"


def commands_page() -> str:
    """Return the page with the help of every command."""
    os.environ["COLUMNS"] = HELP_COLUMNS
    parts = [_title("Commands")]
    parts.append("Exit codes: 0, 1 failure, 2 wrong usage, 130 interrupted.\n")
    parts.append(f"```text\n{overview()}\n```\n")
    for name, command in COMMANDS.items():
        if not command.hidden:
            text = command_parser(name).format_help().rstrip()
            parts.append(f"## dynamo {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def errors_page() -> str:
    """Return the page of error codes with their HTTP status."""
    _import_everything()
    parts = [_title("Errors")]
    parts.append(
        'Over HTTP an error is `{"error": {message, type, code, param, hint, request_id}}`. In a '
        "stream that has begun, the error is a `data:` event before `[DONE]`. Programs should test "
        "`code`. Statuses 429 and 503 carry `Retry-After`. Commands print a line `error:` and "
        "usually a line `hint:`; wrong usage exits with 2, any other error with 1.\n"
    )
    kinds: dict[str, type[DynamoError]] = {}
    for kind in _subclasses(DynamoError):
        kinds.setdefault(kind.code, kind)
    rows = [
        (f"`{code}`", _status(kind), "yes" if kind.retryable else "", _first_line(kind))
        for code, kind in sorted(kinds.items())
    ]
    parts.append(_table(("code", "HTTP status", "retry", "meaning"), rows))
    return "\n".join(parts)


def _status(kind: type[DynamoError]) -> str:
    for base in kind.__mro__:
        status = http_errors.STATUS_BY_CODE.get(getattr(base, "code", ""))
        if status is not None and base is not DynamoError:
            return str(status)
    return "500" if kind.code == "internal_error" else ""


def _subclasses(base: type[DynamoError]) -> Iterator[type[DynamoError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


class Metric(NamedTuple):
    """A metric that the code declares."""

    name: str
    kind: str
    help: str
    labels: str


def metrics_page() -> str:
    """Return the page of metrics."""
    parts = [_title("Metrics")]
    parts.append(
        "`/metrics` of the HTTP port has the metrics of all frontends that share the port. Every "
        "process has a status port with its own metrics; `dynamo ps` and `/metrics/targets` list "
        "these ports. Histograms have `_bucket`, `_sum` and `_count`. In frontends and routers, "
        "metrics of admission, router, migrations, workers and index have the label `model`, too. "
        "[This page](../how-to/watch.md#metrics) has the names of vLLM that workers add.\n"
    )
    metrics = sorted(declared_metrics(ROOT / "src"))
    rows = [(f"`{metric.name}`", metric.kind, metric.labels, metric.help) for metric in metrics]
    parts.append(_table(("metric", "kind", "labels", "meaning"), rows))
    return "\n".join(parts)


def declared_metrics(source: Path) -> set[Metric]:
    """Return the metrics declared as `registry.counter(NAME, HELP, ...)`, gauge or histogram."""
    metrics = set()
    for text in (path.read_text() for path in source.rglob("*.py")):
        if not any(f"{kind}(" in text for kind in METRIC_KINDS):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        names = {
            target.id: node.value
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        metrics |= {metric for node in nodes if (metric := _metric(node, names))}
    return metrics


def _metric(node: ast.AST, names: Mapping[str, ast.expr]) -> Metric | None:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    function = node.func
    kind = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if kind not in METRIC_KINDS or ast.unparse(function).startswith("aliases."):
        return None  # aliases: other names of metrics that are listed
    name, text = (ast.unparse(arg) for arg in node.args[:2])
    if not name.startswith("'"):
        return None
    position = 3 if kind == "histogram" else 2
    keyword = [word.value for word in node.keywords if word.arg == "labels"]
    labels = keyword or node.args[position : position + 1]
    constant = names.get(labels[0].id) if labels and isinstance(labels[0], ast.Name) else None
    literal = constant if constant is not None else (labels[0] if labels else None)
    words = ast.literal_eval(literal) if literal is not None else ()
    return Metric(ast.literal_eval(name), kind, ast.literal_eval(text), ", ".join(words))


def http_page() -> str:
    """Return the page of HTTP routes and request fields."""
    parts = [_title("HTTP")]
    rows = [(f"`{method}`", f"`{path}`", text) for path, method, text in declared_routes()]
    parts.append(_table(("method", "path", "response"), rows))
    parts.append(
        "\nOther fields are ignored. If `server.api_keys` is set, requests need `Authorization: "
        "Bearer KEY` or `x-api-key: KEY`. Responses have the request's `x-request-id`, or a new "
        "one. `x-dynamo-timeout: SECONDS` limits the whole request (504 `deadline_exceeded`) if it "
        "is shorter than `server.request_timeout`.\n\n"
        "Requests of web pages, which browsers mark with `Origin`, need an origin in "
        "`server.cors_origins` and `content-type: application/json`. On loopback without keys, "
        "`Host` must be an IP address, localhost, a name without a dot, or one of "
        "`server.allowed_hosts`. Other requests get 403 `forbidden` before their body is read. "
        "`priority` is clamped to `server.priority_range`. `/tokenize` and `/detokenize` refuse "
        "more than the model's context.\n\n"
        "A body may have `server.max_body_bytes` (413 `request_too_large`). All bodies that are "
        "incomplete, wait or have prompts to encode may have `server.max_buffered_bytes` (503 "
        "`overloaded`). Their key is checked before they are read. A body of more than 64 KiB may "
        "have so many values as fit the longest context (413). A body must arrive at 1 KiB/s or "
        "faster, with pauses up to "
        "`server.header_timeout` (408).\n\n"
        "Keep the connection open in both directions until the answer is complete. A client that "
        "closes its writing side after the request (a half-close, e.g. `shutdown(SHUT_WR)` or "
        "`nc -N`) counts as gone, because a client that left looks the same: its request is "
        "cancelled.\n"
    )
    for title, body in (
        ("chat/completions", ChatBody),
        ("completions", CompletionBody),
        ("messages", MessagesBody),
        ("responses", ResponsesBody),
        ("embeddings", EmbeddingBody),
        ("score", ScoreBody),
        ("rerank", RerankBody),
    ):
        parts.append(f"## /v1/{title}\n")
        rejected = sorted(f"`{name}`" for name in _rejected_fields(body))
        rows = [row for row in _fields(body) if row[0] not in rejected]
        parts.append(_table(("field", "type", "range"), rows))
        if rejected:
            parts.append(f"Rejected if they would change the answer: {', '.join(rejected)}.\n")
    return "\n".join(parts)


FILES_WITH_ROUTES = ("app.py", "responses/handler.py", "status.py", "front_page.py")
ROUTES = {
    "/v1/chat/completions": "continue a conversation; `stream: true` for server-sent events",
    "/v1/completions": "continue a text, a list of texts, or token ids",
    "/v1/messages": "continue a conversation in the format of Anthropic",
    "/v1/messages/count_tokens": "the number of tokens in the prompt of such a conversation",
    "/v1/responses": "answer items by items, and store both; `stream: true` for events",
    "/v1/responses/": "a stored response: its id follows, then maybe `/input_items` or `/cancel`",
    "/v1/responses/input_tokens": "the number of tokens of such a request",
    "/v1/responses/compact": "refused: responses cannot be compacted",
    "/v1/embeddings": "the vectors of texts or token ids, by an embedding model",
    "/v1/score": "the cosine of each pair of texts, as vLLM answers",
    "/v1/rerank": "the documents nearest to a query, as Cohere and Jina answer",
    "/v1/models": "the models that are served",
    "/v1/models/": "one model; its name follows",
    "/tokenize": "the token ids of a text or conversation",
    "/detokenize": "the text of token ids",
    "/tokenizer_info": "the tokens that begin and end a text of the model `default`",
    "/health": "200 if requests can be served, else 503 with the reason",
    "/live": "200 while the process responds",
    "/ready": "200 while requests should come here, otherwise 503 with the reason",
    "/metrics": "[metrics](metrics.md) in Prometheus' text format",
    "/metrics/targets": "the status ports of all processes, for Prometheus' `http_sd_configs`",
    "/version": "the version",
    "/": "browsers get to the console or a page of what is served; others a 404 with the routes",
    "/favicon.ico": "an icon for browsers",
}


def declared_routes() -> Iterator[tuple[str, str, str]]:
    """Yield (path, method, description) of every route in the application's tables."""
    folder = Path(dynamo.__path__[0]) / "application"
    trees = [ast.parse((folder / name).read_text()) for name in FILES_WITH_ROUTES]
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(node.keys, node.values, strict=True):
            path = key.value if isinstance(key, ast.Constant) else None
            if isinstance(path, str) and path.startswith("/") and isinstance(value, ast.Dict):
                for method in value.keys:
                    yield path, str(ast.literal_eval(method or "")), ROUTES[path]
    for path, text in PATHS.items():  # of the observer
        yield path, "GET", text


def _rejected_fields(body: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(body):
        if any(isinstance(mark, Neutral) for mark in get_args(field.type)[1:]):
            yield field.name


def _fields(body: type[msgspec.Struct]) -> Iterator[Sequence[str]]:
    schema = msgspec.json.schema(body)["$defs"][body.__name__]
    for name, field in schema["properties"].items():
        arms = [arm for arm in field.get("anyOf", [field]) if arm.get("type") != "null"]
        required = " (required)" if name in schema.get("required", ()) else ""
        kinds = " or ".join(dict.fromkeys(_kind(arm) for arm in arms))
        yield f"`{name}`", kinds + required, "; ".join(filter(None, map(_range, arms)))


def _kind(arm: Mapping[str, Any]) -> str:
    if arm.get("type") == "array":
        return f"list of {_kind(arm.get('items') or {})}"
    if "enum" in arm:
        return " or ".join(f"`{value}`" for value in arm["enum"])
    return str(arm.get("type") or arm.get("$ref", "any").rpartition("/")[2])


def _range(arm: Mapping[str, Any]) -> str:
    low = arm.get("minimum", arm.get("exclusiveMinimum"))
    high = arm.get("maximum")
    if (low is None and high is None) or abs(high or 0) >= 1 << 31:
        return ""
    return ("over " if "exclusiveMinimum" in arm else "") + _bounds(low, high)


def _import_everything() -> None:
    for module in pkgutil.walk_packages(dynamo.__path__, "dynamo."):
        if "__main__" not in module.name and "torch" not in module.name:
            importlib.import_module(module.name)


def _title(name: str) -> str:
    return f"# {name}\n\n<!-- {MADE}. -->\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [
        " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows
    ]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").splitlines()[0]


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def _difference(path: Path, text: str) -> list[str]:
    before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return list(difflib.unified_diff(before, text.splitlines(), "is", "should be", "", "", 1, ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
