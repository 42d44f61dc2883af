"""The files of a batch: lines in, and the answers that are there already."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DEFAULT = "default"


class Task(msgspec.Struct, frozen=True):
    """One line. `wrong`: why it cannot be asked."""

    id: str
    path: str = ""
    body: dict[str, Any] = {}
    wrong: str = ""


class Plan(msgspec.Struct, frozen=True):
    """How many lines there are, how many of them have no answer yet, and whose answers exist."""

    total: int
    left: int
    done: frozenset[str]


def plan(source: Path, output: Path) -> Plan:
    """Compare input and output, and cut off what a crash left of the output's last line. Raises
    `ConfigError`: no such file, or an id that stands twice."""
    done = answered(output)
    seen: dict[str, int] = {}
    left = 0
    for number, task in _numbered(source):
        if task.id in seen:
            raise ConfigError(
                f"{source}: id {task.id!r} stands in lines {seen[task.id]} and {number}",
                hint="answers are found by their ids: give each line its own, or none",
            )
        seen[task.id] = number
        left += task.id not in done
    return Plan(total=len(seen), left=left, done=done)


def read_tasks(source: Path, done: Container[str]) -> Iterator[Task]:
    """The lines whose ids are not in `done`."""
    return (task for _, task in _numbered(source) if task.id not in done)


def answered(output: Path) -> frozenset[str]:
    """Ids that have an answer which is no error. Raises `ConfigError` where the file holds
    something else."""
    if not output.exists():
        return frozenset()
    done = set()
    whole = 0
    with output.open("rb+") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                lines.truncate(whole)
                break
            whole += len(line)
            try:
                found = msgspec.json.decode(line)
                if found["error"] is None:
                    done.add(str(found["custom_id"]))
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{output} is not the output of a batch", hint="give another --output"
                ) from error
    return frozenset(done)


def parse_task(line: bytes, number: int) -> Task:
    """One line in OpenAI's batch shape, or with `messages`, `prompt` or `text`; an id of its own
    or its number."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Task(id=f"line-{number}", wrong=f"line {number} is not JSON: {error}")
    if not isinstance(found, dict):
        return Task(id=f"line-{number}", wrong=f"line {number} is not an object")
    name = str(found.pop("custom_id", None) or found.pop("id", None) or f"line-{number}")
    path = ""
    if isinstance(found.get("body"), dict):
        path = str(found.get("url", CHAT))
        found = found["body"]
    if "text" in found and not path:
        found["messages"] = [{"role": "user", "content": found.pop("text")}]
    path = path or (CHAT if "messages" in found else COMPLETIONS if "prompt" in found else "")
    if not path.startswith("/"):
        return Task(id=name, wrong=f"line {number} has none of body, messages, prompt, text")
    for unwanted in ("stream", "stream_options"):
        found.pop(unwanted, None)
    return Task(id=name, path=path, body={"model": DEFAULT} | found)


def _numbered(source: Path) -> Iterator[tuple[int, Task]]:
    try:
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, parse_task(line, number)
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error
