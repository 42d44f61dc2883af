"""`dynamo run in=batch:FILE.jsonl`: answer the lines of a file that have no answer yet."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from dynamo.cli.inputs.batch_file import (
    BatchLine,
    BatchOptions,
    BatchPlan,
    plan_batch,
    read_pending_lines,
)
from dynamo.cli.inputs.temporary import run_in_deployment
from dynamo.cli.parsing import EXIT_INTERRUPTED
from dynamo.cli.progress_bar import ProgressBar, render_bar
from dynamo.core.settings import Settings
from dynamo.core.tasks import run_all
from dynamo_client import DynamoAPIError, DynamoClient, DynamoConfig, DynamoTimeoutError


def run_batch(settings: Settings, options: BatchOptions) -> int:
    """Answer all lines by a deployment. Returns 1 if a line failed, 130 if interrupted."""
    plan = plan_batch(options.source, options.output)
    run = BatchRun(plan, options)
    code = run_in_deployment(settings, "temporary", run.send_all) if plan.pending_lines else 0
    run.print_summary()
    return code or run.exit_code


class BatchRun:
    """A pass over the lines that have no answer yet."""

    def __init__(self, plan: BatchPlan, options: BatchOptions) -> None:
        self._plan = plan
        self._options = options
        self._started_s = time.monotonic()
        self.answered = self.failed = 0
        self.prompt_tokens = self.completion_tokens = 0

    @property
    def exit_code(self) -> int:
        """Exit code: 130 if lines are left, 1 if a line failed, else 0."""
        if self.answered + self.failed < self._plan.pending_lines:
            return EXIT_INTERRUPTED
        return 1 if self.failed else 0

    async def send_all(self, bar: ProgressBar, config: DynamoConfig) -> int:
        """Send the pending lines to the deployment of `config`."""
        self._started_s = time.monotonic()
        senders = min(self._options.concurrency, self._plan.pending_lines)
        with bar, await asyncio.to_thread(self._options.output.open, "ab", 0) as out:
            async with DynamoClient(config) as client:
                lines = read_pending_lines(self._options.source, self._plan.answered_ids)
                await run_all(*(self._run_sender(client, lines, out, bar) for _ in range(senders)))
        return 0

    async def _run_sender(
        self, client: DynamoClient, lines: Iterator[BatchLine], out: BinaryIO, bar: ProgressBar
    ) -> None:
        for line in lines:
            record = await self._send_line(client, line)
            out.write(msgspec.json.encode(record) + b"\n")
            if bar.should_redraw("batch", last=self._completed == self._plan.pending_lines):
                bar.show(self._progress_line())

    @property
    def _completed(self) -> int:
        return self.answered + self.failed

    async def _send_line(self, client: DynamoClient, line: BatchLine) -> dict[str, Any]:
        """Send a line and return the record for the output file. Raises `DynamoConnectionError`, so
        that the line stays pending."""
        if line.error:
            return self._failed_record(line, 400, {"code": "invalid_line", "message": line.error})
        try:
            body = await client.post(line.path, line.body)
        except DynamoAPIError as error:
            error_body = {"code": error.code, "message": error.message, "hint": error.hint}
            return self._failed_record(line, error.status, error_body)
        except DynamoTimeoutError as error:
            error_body = {"code": "timeout", "message": error.message, "hint": ""}
            return self._failed_record(line, 408, error_body)
        self.answered += 1
        usage = body.get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.completion_tokens += usage.get("completion_tokens", 0)
        response = {"status_code": 200, "request_id": body.get("id"), "body": body}
        return {"custom_id": line.custom_id, "response": response, "error": None}

    def _failed_record(self, line: BatchLine, status: int, error: dict[str, str]) -> dict[str, Any]:
        self.failed += 1
        response = {"status_code": status}
        return {"custom_id": line.custom_id, "response": response, "error": error}

    def _progress_line(self) -> str:
        done, total = self._completed, self._plan.pending_lines
        failed = f", {self.failed:,} failed" if self.failed else ""
        return (
            f"batch {render_bar(done / total)} {done / total:4.0%}  {done:,} of {total:,}{failed}"
        )

    def print_summary(self) -> None:
        """Print a summary to standard error."""
        duration_s = max(time.monotonic() - self._started_s, 1e-9)
        pending = self._plan.pending_lines - self._completed
        parts = [f"{self.answered:,} answered", f"{self.failed:,} failed"]
        if before := self._plan.total_lines - self._plan.pending_lines:
            parts.append(f"{before:,} answered before")
        if pending:
            parts.append(f"{pending:,} pending: run the same command again to continue")
        lines = [f"{', '.join(parts)}; output: {self._options.output}"]
        if self._completed:
            lines.append(
                f"{duration_s:.1f} s: {self._completed / duration_s:,.1f} requests/s, "
                f"{self.completion_tokens / duration_s:,.0f} tokens/s; "
                f"{self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} generated"
            )
        print("\n".join(lines), file=sys.stderr)
