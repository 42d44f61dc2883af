"""`dynamo run in=batch:FILE.jsonl`: answer every line of a file, and go on where one stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from dynamo.cli.bar import Bar, drawn
from dynamo.cli.batch_lines import Plan, Task, plan, read_tasks
from dynamo.cli.batch_options import Options
from dynamo.cli.fetch import names_of
from dynamo.core.settings import Settings
from dynamo.core.tasks import run_all
from dynamo_client import DynamoAPIError, DynamoClient, DynamoConfig, DynamoTimeoutError

RETRIES = 6
RETRY_DELAY_S = 0.25
DEFAULT_LEVEL = "info"
QUIET_LEVEL = "warn"
INTERRUPTED = 130


def start(settings: Settings, options: Options) -> int:
    """Run a deployment until all is answered. Returns 1 if a line failed, 130 if interrupted."""
    work = plan(options.source, options.output)
    run = Run(work, options, _client_config(settings))
    if not work.left:
        run.tell()
        return 0

    from dynamo.services.errand import serve_while
    from dynamo.services.preparation import preparation
    from dynamo.telemetry.logs import configure

    if settings.logging.level == DEFAULT_LEVEL:
        settings = replace(settings, logging=replace(settings.logging, level=QUIET_LEVEL))
    names_of(settings)
    logs = Bar(sys.stderr)
    configure(settings.logging.level, settings.logging.format, "supervisor", logs)
    prepare = preparation(settings, logs)
    code = serve_while(settings, partial(run.drive, logs), prepare=prepare, logs=logs)
    run.tell()
    return code or run.code


class Run:
    """One pass over the lines that have no answer yet."""

    def __init__(self, work: Plan, options: Options, config: DynamoConfig) -> None:
        self._work = work
        self._options = options
        self._config = config
        self._began_s = time.monotonic()
        self.answered = self.failed = 0
        self.prompt_tokens = self.completion_tokens = 0

    @property
    def code(self) -> int:
        """Exit code."""
        if self.answered + self.failed < self._work.left:
            return INTERRUPTED
        return 1 if self.failed else 0

    async def drive(self, bar: Bar, url: str) -> int:
        """Ask the deployment at `url` for all that is left."""
        self._began_s = time.monotonic()
        lanes = min(self._options.concurrency, self._work.left)
        with bar, await asyncio.to_thread(self._options.output.open, "ab", 0) as out:
            async with DynamoClient(dataclasses.replace(self._config, base_url=url)) as client:
                tasks = read_tasks(self._options.source, self._work.done)
                await run_all(*(self._lane(client, tasks, out, bar) for _ in range(lanes)))
        return 0

    async def _lane(
        self, client: DynamoClient, tasks: Iterator[Task], out: BinaryIO, bar: Bar
    ) -> None:
        for task in tasks:
            record = await self._answer(client, task)
            out.write(msgspec.json.encode(record) + b"\n")
            if bar.due("batch", last=self._ended == self._work.left):
                bar.show(self._progress())

    @property
    def _ended(self) -> int:
        return self.answered + self.failed

    async def _answer(self, client: DynamoClient, task: Task) -> dict[str, Any]:
        """The output line of one task. Raises `DynamoConnectionError`, which is no answer."""
        if task.wrong:
            return self._failure(task, 400, {"code": "invalid_line", "message": task.wrong})
        try:
            body = await client.post(task.path, task.body)
        except DynamoAPIError as error:
            told = {"code": error.code, "message": error.message, "hint": error.hint}
            return self._failure(task, error.status, told)
        except DynamoTimeoutError as error:
            told = {"code": "timeout", "message": error.message, "hint": ""}
            return self._failure(task, 408, told)
        self.answered += 1
        usage = body.get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.completion_tokens += usage.get("completion_tokens", 0)
        response = {"status_code": 200, "request_id": body.get("id"), "body": body}
        return {"custom_id": task.id, "response": response, "error": None}

    def _failure(self, task: Task, status: int, error: dict[str, str]) -> dict[str, Any]:
        self.failed += 1
        response = {"status_code": status}
        return {"custom_id": task.id, "response": response, "error": error}

    def _progress(self) -> str:
        done, total = self._ended, self._work.left
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"batch {drawn(done / total)} {done / total:4.0%}  {done:,} of {total:,}{failed}"

    def tell(self) -> None:
        """The summary, on standard error."""
        took_s = max(time.monotonic() - self._began_s, 1e-9)
        open_still = self._work.left - self._ended
        parts = [f"{self.answered:,} answered", f"{self.failed:,} failed"]
        if before := self._work.total - self._work.left:
            parts.append(f"{before:,} answered before")
        if open_still:
            parts.append(f"{open_still:,} left: the same command goes on with them")
        lines = [f"{', '.join(parts)}; output: {self._options.output}"]
        if self._ended:
            lines.append(
                f"{took_s:.1f} s: {self._ended / took_s:,.1f} requests/s, "
                f"{self.completion_tokens / took_s:,.0f} tokens/s; "
                f"{self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} generated"
            )
        print("\n".join(lines), file=sys.stderr)


def _client_config(settings: Settings) -> DynamoConfig:
    keys = settings.server.api_keys
    return DynamoConfig(
        api_key=keys[0] if keys else None,
        timeout=settings.server.request_timeout + 5,
        max_retries=RETRIES,
        retry_delay=RETRY_DELAY_S,
    )
