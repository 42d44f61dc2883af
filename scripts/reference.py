#!/usr/bin/env python3
"""Write docs/reference from the code; with --check, only tell whether it is up to date.

scripts/reference.py [--check]
"""

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
from typing import Any, NamedTuple

import msgspec

import dynamo
from dynamo.application import http_errors
from dynamo.application.openai.chat import ChatBody
from dynamo.application.openai.completions import CompletionBody
from dynamo.application.openai.generation_body import NEUTRAL_VALUES
from dynamo.cli.commands import COMMANDS, command_parser
from dynamo.cli.entry import overview
from dynamo.core.errors import DynamoError
from dynamo.core.settings import SettingSpec
from dynamo.core.settings.keys import (
    environment_name,
    section_descriptions,
    setting_specs_by_key,
)
from dynamo.core.settings.load import ENVIRONMENT_ALIASES
from dynamo.core.settings.values import type_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- Made by scripts/reference.py from the code (`make docs`). -->\n"
HELP_COLUMNS = "100"


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or compare them. Returns 1 if one is out of date."""
    made = pages()
    if "--check" in arguments:
        return _compare(made)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


def _compare(made: Mapping[str, str]) -> int:
    stale = [name for name, text in made.items() if not _same(FOLDER / name, text)]
    for name in stale:
        print(f"docs/reference/{name} is out of date: run `make docs`")
        print("\n".join(_difference(FOLDER / name, made[name])))
    return 1 if stale else 0


def pages() -> Mapping[str, str]:
    """Every page by its file name."""
    return {
        "settings.md": settings_page(),
        "commands.md": commands_page(),
        "errors.md": errors_page(),
        "metrics.md": metrics_page(),
        "http.md": http_page(),
    }


def settings_page() -> str:
    """Every setting, a table a section."""
    parts = [_title("Settings")]
    parts.append(
        "Each setting is declared once. Precedence: flag, then environment, then the file named by "
        "`--config` or `DYNAMO_CONFIG_PATH`, then the default. Any setting may be given as "
        "`--SECTION.KEY VALUE`. Sizes take units (`8GB` = 8·10⁹, `16Gi` = 16·2³⁰ bytes), durations "
        "too (`15s`, `2m`, `300ms`); bare numbers are in the unit shown. In names and modes `-` "
        "and `_` are equal. An unknown key is an error that names the nearest one. `dynamo config "
        "explain FILE` prints every effective value and where it came from. Settings take effect "
        "at a start; those **changed while serving** also when the file is written, or the "
        "supervisor gets SIGHUP.\n"
    )
    short = ", ".join(f"`{name}` (`{key}`)" for name, key in ENVIRONMENT_ALIASES.items())
    parts.append(f"Short names in the environment: {short}, `DYNAMO_CONFIG_PATH` (the file).\n")
    declared = setting_specs_by_key().values()
    for section, about in section_descriptions().items():
        parts.append(f"## {section}\n\n{about}\n")
        rows = [_setting_row(one) for one in declared if one.key.partition(".")[0] == section]
        parts.append(_table(SETTING_COLUMNS, rows))
    for one in declared:
        if one.entry_schema is not None:
            parts.append(f"## {one.key}[]\n\nA list; {one.meta.help}. Each entry:\n")
            entry_specs = setting_specs_by_key(one.entry_schema).values()
            rows = [_setting_row(inner, one.key) for inner in entry_specs]
            parts.append(_table(SETTING_COLUMNS, rows))
    return "\n".join(parts)


SETTING_COLUMNS = ("setting", "type", "default", "flag", "what it does")


def _setting_row(one: SettingSpec, entry_of: str = "") -> Sequence[str]:
    about = one.meta
    kind = type_name(one) + (f", {about.unit}" if about.unit else "")
    notes = [about.help]
    if about.choices:
        notes.append(f"one of {', '.join(f'`{choice}`' for choice in about.choices)}")
    if about.ge is not None or about.le is not None:
        notes.append(_bounds(about.ge, about.le))
    if about.reload:
        notes.append("**changed while serving**")
    if about.unused:
        notes.append("**not in use yet**")
    if about.not_yet:
        words = ", ".join(f"`{word}`" for word, _ in about.not_yet)
        notes.append(f"not in use yet: {words}")
    if about.aliases:
        notes.append(f"also {', '.join(f'`{alias}`' for alias in about.aliases)}")
    if about.secret:
        notes.append("never shown")
    name = f"`{one.key}`" if entry_of else f"`{one.key}`<br>`{environment_name(one.key)}`"
    return (
        name,
        kind,
        _shown(one.default),
        f"`{about.flag}`" if about.flag else "",
        "; ".join(notes),
    )


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"


def _shown(default: Any) -> str:
    if default is None or default in ("", ()):
        return ""
    return f"`{', '.join(default) if isinstance(default, tuple) else default}`"


def commands_page() -> str:
    """The help of every command."""
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
    """Every error code with its HTTP status."""
    _import_everything()
    parts = [_title("Errors")]
    parts.append(
        'Over HTTP an error is `{"error": {message, type, code, param, hint, request_id}}`; in a '
        "stream that has begun it is one `data:` event before `[DONE]`. `code` is what a program "
        "tests. Statuses 429 and 503 carry `Retry-After`. On the command line an error is a line "
        "`error:` and mostly a line `hint:`; wrong usage exits with 2, everything else with 1.\n"
    )
    found: dict[str, type[DynamoError]] = {}
    for kind in _subclasses(DynamoError):
        found.setdefault(kind.code, kind)
    rows = [
        (f"`{code}`", _status(kind), "yes" if kind.retryable else "", _first_line(kind))
        for code, kind in sorted(found.items())
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
    """A metric as it is declared in the code."""

    name: str
    kind: str
    help: str
    labels: str


def metrics_page() -> str:
    """Every metric that the code declares."""
    parts = [_title("Metrics")]
    parts.append(
        "The HTTP port's `/metrics` tells of the frontend (of all frontends that share the port); "
        "every process has a status port with its own, listed by `dynamo ps`. Histograms have "
        "`_bucket`, `_sum` and `_count`.\n"
    )
    rows = [
        (f"`{one.name}`", one.kind, one.labels, one.help)
        for one in sorted(declared_metrics(ROOT / "src"))
    ]
    parts.append(_table(("metric", "kind", "labels", "meaning"), rows))
    return "\n".join(parts)


def declared_metrics(source: Path) -> set[Metric]:
    """Metrics by their declarations: `registry.counter(NAME, HELP, ...)` and the like."""
    found = set()
    for path in source.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        found |= {one for node in ast.walk(tree) if (one := _metric(node, names))}
    return found


def _metric(node: ast.AST, names: Mapping[str, ast.expr]) -> Metric | None:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    called = (
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    )
    name, text = (ast.unparse(arg) for arg in node.args[:2])
    if called not in {"counter", "gauge", "histogram"} or not name.startswith("'"):
        return None
    at = 3 if called == "histogram" else 2
    given = [word.value for word in node.keywords if word.arg == "labels"]
    labels = given or node.args[at : at + 1]
    literal = names.get(labels[0].id) if labels and isinstance(labels[0], ast.Name) else None
    shown = literal if literal is not None else (labels[0] if labels else None)
    words = ast.literal_eval(shown) if shown is not None else ()
    return Metric(ast.literal_eval(name), called, ast.literal_eval(text), ", ".join(words))


def http_page() -> str:
    """Routes, and the fields of the two bodies."""
    parts = [_title("HTTP")]
    refused: set[str] = set(NEUTRAL_VALUES)
    rows = [(f"`{method}`", f"`{path}`", text) for path, method, text in declared_routes()]
    parts.append(_table(("method", "path", "what it answers"), rows))
    parts.append(
        "\nFields beyond these are ignored. `Authorization: Bearer KEY` where `server.api_keys` is "
        "set. `x-request-id` is taken over, or made, and answered. `x-dynamo-timeout: SECONDS` is "
        "the client's own limit of the whole request (504 `deadline_exceeded`), shorter than "
        "`server.request_timeout`.\n"
    )
    for title, body in (("chat/completions", ChatBody), ("completions", CompletionBody)):
        parts.append(f"## /v1/{title}\n")
        every = list(_fields(body))
        refused |= {name.strip("`") for name, kind, _ in every if kind == "any"}
        fields = [row for row in every if row[1] != "any"]
        parts.append(_table(("field", "type", "range"), fields))
    shown = ", ".join(f"`{name}`" for name in sorted(refused))
    parts.append(f"\nKnown, and refused where they would change the answer: {shown}.\n")
    return "\n".join(parts)


ROUTES = {
    "/v1/chat/completions": "continue a conversation; `stream: true` for server-sent events",
    "/v1/completions": "continue a text, a list of texts, or token ids",
    "/v1/models": "what is served",
    "/v1/models/": "one model, by the name that follows",
    "/tokenize": "a text's or a conversation's token ids",
    "/detokenize": "the text of token ids",
    "/health": "200 when a request would be served, else 503 and why",
    "/live": "200 as long as the process answers",
    "/metrics": "[metrics](metrics.md) in Prometheus' text format",
    "/version": "the version",
    "/router/explain": "the last routing decisions (mode `kv` or `adaptive`, as all of /router)",
    "/router/explain/": "all decisions for a request, by the id that follows (its x-request-id)",
    "/router/report": "how well requests are routed; `?seconds=N`: the last N",
    "/router/timeline": "samples of every worker, one a second; `?since=UNIX`",
    "/router/view": "the same as a page",
}


def declared_routes() -> Iterator[tuple[str, str, str]]:
    """(path, method, description) of every route in the application's table."""
    folder = Path(dynamo.__path__[0]) / "application"
    sources = [(folder / name).read_text() for name in ("app.py", "status.py", "routing.py")]
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            path = key.value if isinstance(key, ast.Constant) else None
            if isinstance(path, str) and path.startswith("/") and isinstance(value, ast.Dict):
                for method in value.keys:
                    yield path, str(ast.literal_eval(method or "")), ROUTES[path]


def _fields(body: type[msgspec.Struct]) -> Iterator[Sequence[str]]:
    schema = msgspec.json.schema(body)
    about = schema["$defs"][body.__name__]
    for name, field in about["properties"].items():
        if name in NEUTRAL_VALUES:
            continue
        arms = [arm for arm in field.get("anyOf", [field]) if arm.get("type") != "null"]
        required = " (required)" if name in about.get("required", ()) else ""
        kinds = " or ".join(dict.fromkeys(_kind(arm) for arm in arms))
        yield f"`{name}`", kinds + required, "; ".join(filter(None, map(_range, arms)))


def _kind(arm: Mapping[str, Any]) -> str:
    if arm.get("type") == "array":
        return f"list of {_kind(arm.get('items') or {})}"
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
    return f"# {name}\n\n{MADE}"


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
