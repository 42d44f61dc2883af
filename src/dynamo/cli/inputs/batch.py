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

from dynamo.cli.inputs.batch_file import (
    BatchLine,
    BatchOptions,
    BatchPlan,
    plan_batch,
    read_pending_lines,
)
from dynamo.cli.progress_bar import ProgressBar, render_bar
from dynamo.cli.served_model import served_model_names
from dynamo.core.settings import Settings
from dynamo.core.tasks import run_all
from dynamo_client import DynamoAPIError, DynamoClient, DynamoConfig, DynamoTimeoutError

RETRIES = 6
RETRY_DELAY_S = 0.25
DEFAULT_LOG_LEVEL = "info"
BATCH_LOG_LEVEL = "warn"
EXIT_INTERRUPTED = 130


def run_batch(settings: Settings, options: BatchOptions) -> int:
    """Run a deployment until all is answered. Returns 1 if a line failed, 130 if interrupted."""
    work = plan_batch(options.source, options.output)
    run = BatchRun(work, options, _client_config(settings))
    if not work.pending_lines:
        run.print_summary()
        return 0

    from dynamo.services.deployment.temporary import run_with_temporary_deployment
    from dynamo.services.model_download import make_preparation
    from dynamo.telemetry.logs import configure_logging

    if settings.logging.level == DEFAULT_LOG_LEVEL:
        settings = replace(settings, logging=replace(settings.logging, level=BATCH_LOG_LEVEL))
    served_model_names(settings)
    logs = ProgressBar(sys.stderr)
    configure_logging(settings.logging.level, settings.logging.format, "supervisor", logs)
    prepare = make_preparation(settings, logs)
    code = run_with_temporary_deployment(
        settings, partial(run.send_all, logs), prepare=prepare, logs=logs
    )
    run.print_summary()
    return code or run.exit_code


class BatchRun:
    """One pass over the lines that have no answer yet."""

    def __init__(self, work: BatchPlan, options: BatchOptions, config: DynamoConfig) -> None:
        self._plan = work
        self._options = options
        self._config = config
        self._started_s = time.monotonic()
        self.answered = self.failed = 0
        self.prompt_tokens = self.completion_tokens = 0

    @property
    def exit_code(self) -> int:
        """Exit code."""
        if self.answered + self.failed < self._plan.pending_lines:
            return EXIT_INTERRUPTED
        return 1 if self.failed else 0

    async def send_all(self, bar: ProgressBar, url: str) -> int:
        """Ask the deployment at `url` for all that is left."""
        self._started_s = time.monotonic()
        lanes = min(self._options.concurrency, self._plan.pending_lines)
        with bar, await asyncio.to_thread(self._options.output.open, "ab", 0) as out:
            async with DynamoClient(dataclasses.replace(self._config, base_url=url)) as client:
                tasks = read_pending_lines(self._options.source, self._plan.answered_ids)
                await run_all(*(self._run_sender(client, tasks, out, bar) for _ in range(lanes)))
        return 0

    async def _run_sender(
        self, client: DynamoClient, tasks: Iterator[BatchLine], out: BinaryIO, bar: ProgressBar
    ) -> None:
        for task in tasks:
            record = await self._send_line(client, task)
            out.write(msgspec.json.encode(record) + b"\n")
            if bar.should_redraw("batch", last=self._completed == self._plan.pending_lines):
                bar.show(self._progress_line())

    @property
    def _completed(self) -> int:
        return self.answered + self.failed

    async def _send_line(self, client: DynamoClient, task: BatchLine) -> dict[str, Any]:
        """The output line of one task. Raises `DynamoConnectionError`, which is no answer."""
        if task.error:
            return self._failed_record(task, 400, {"code": "invalid_line", "message": task.error})
        try:
            body = await client.post(task.path, task.body)
        except DynamoAPIError as error:
            told = {"code": error.code, "message": error.message, "hint": error.hint}
            return self._failed_record(task, error.status, told)
        except DynamoTimeoutError as error:
            told = {"code": "timeout", "message": error.message, "hint": ""}
            return self._failed_record(task, 408, told)
        self.answered += 1
        usage = body.get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.completion_tokens += usage.get("completion_tokens", 0)
        response = {"status_code": 200, "request_id": body.get("id"), "body": body}
        return {"custom_id": task.custom_id, "response": response, "error": None}

    def _failed_record(self, task: BatchLine, status: int, error: dict[str, str]) -> dict[str, Any]:
        self.failed += 1
        response = {"status_code": status}
        return {"custom_id": task.custom_id, "response": response, "error": error}

    def _progress_line(self) -> str:
        done, total = self._completed, self._plan.pending_lines
        failed = f", {self.failed:,} failed" if self.failed else ""
        return (
            f"batch {render_bar(done / total)} {done / total:4.0%}  {done:,} of {total:,}{failed}"
        )

    def print_summary(self) -> None:
        """The summary, on standard error."""
        took_s = max(time.monotonic() - self._started_s, 1e-9)
        open_still = self._plan.pending_lines - self._completed
        parts = [f"{self.answered:,} answered", f"{self.failed:,} failed"]
        if before := self._plan.total_lines - self._plan.pending_lines:
            parts.append(f"{before:,} answered before")
        if open_still:
            parts.append(f"{open_still:,} left: the same command goes on with them")
        lines = [f"{', '.join(parts)}; output: {self._options.output}"]
        if self._completed:
            lines.append(
                f"{took_s:.1f} s: {self._completed / took_s:,.1f} requests/s, "
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
