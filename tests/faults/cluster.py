"""A deployment of real processes with streaming clients and ways to inject faults."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from tests.faults.stream_client import Answer, ask, body_of, read
from tests.support.servers import EtcdProcess, NatsProcess, S3Process, free_port

from dynamo.runtime.deployment import Deployment, ProcessRecord

PLANES = ("plain", "servers", "pods")
STEP_MS = 20
InjectFault = Callable[[], Awaitable[object]]


class Cluster:
    """A deployment with mock workers, used with `with`.

    With `prefill` and `decode` it has workers of these roles, and `workers` that do both.
    `planes` is "plain" (file, tcp) or "servers" (etcd, NATS). `s3` adds an object store. `output` is a descriptor for the log
    instead of a file. If it is a terminal, the deployment has it as its controlling terminal.
    `name` is the model's. On exit, no process may have logged a traceback. `prefix` stands before the command, for example a
    shell that changes limits and then runs it.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        planes: str = "plain",
        *,
        workers: int = 3,
        prefill: int = 0,
        decode: int = 0,
        frontends: int = 1,
        flags: Sequence[str] = (),
        timing: str = f"constant:0.02,{STEP_MS}",
        output: int | None = None,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        s3: bool = False,
        name: str = "tiny",
    ) -> None:
        self.folder = folder
        self.s3 = S3Process() if s3 else None
        self.port = free_port()
        self.etcd = EtcdProcess() if planes == "servers" else None
        self.nats = NatsProcess() if planes == "servers" else None
        self._stack = ExitStack()
        self._reference: dict[tuple[int, int], str] = {}
        counts = {"worker": workers, "prefill_worker": prefill, "decode_worker": decode}
        self.workers = {role: count for role, count in counts.items() if count}
        self._frontends = frontends
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._environ = environ or {}
        self._command = [
            *prefix,
            *(sys.executable, "-P", "-m", "dynamo", "run", "out=mock", str(model)),
            *("--workers", str(workers), "--http-workers", str(frontends)),
            *("--prefill-workers", str(prefill), "--decode-workers", str(decode)),
            *("--http-port", str(self.port), "--model-name", name, "--timing", timing, *flags),
        ]

    def __enter__(self) -> Self:
        self.environ = os.environ | {"XDG_RUNTIME_DIR": str(self.folder), **self._environ}
        if self.etcd is not None and self.nats is not None:
            self._stack.enter_context(self.etcd)
            self._stack.enter_context(self.nats)
            self.environ["DYNAMO_ETCD_ENDPOINTS"] = f"http://127.0.0.1:{self.etcd.port}"
            self.environ["DYNAMO_NATS_URL"] = self.nats.url
        if self.s3 is not None:
            self._stack.enter_context(self.s3)
            self.environ |= self.s3.environ
        with (self.folder / "log").open("wb") as log:
            output = log.fileno() if self._output is None else self._output
            terminal = os.isatty(output)
            self._process = subprocess.Popen(
                self._command,
                env=self.environ,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=terminal,
                preexec_fn=_control_terminal if terminal else None,  # noqa: PLW1509 - it takes no lock
            )
        self._stack.callback(self._stop)
        try:
            self.wait_blocking(self.all_ready, 30)
            self.wait_blocking(lambda: len(self.ready("frontend")) == self._frontends, 30)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stack.close()
        assert kind or "Traceback" not in self.log, self.log[self.log.index("Traceback") :][:3000]

    @property
    def log(self) -> str:
        """The log of all processes."""
        return (self.folder / "log").read_text()

    def processes(self, role: str) -> list[ProcessRecord]:
        """Return the live processes of a role."""
        name = f"http-{self.port}"
        records = Deployment(name, self.folder / "dynamo" / name).live_processes()
        return [record for record in records if record.role == role]

    def ready(self, role: str) -> list[ProcessRecord]:
        """Return the ready processes of a role."""
        return [record for record in self.processes(role) if record.state == "ready"]

    def all_ready(self) -> bool:
        """Return whether there are as many ready workers of each role as at the start."""
        return all(len(self.ready(role)) == count for role, count in self.workers.items())

    def wait_blocking(self, condition: Callable[[], object], timeout_s: float = 20) -> None:
        """Wait until the condition is true. Blocks."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"not true in time; the log:\n{self.log[-3000:]}"
            time.sleep(0.05)

    async def wait_for(self, condition: Callable[[], object], timeout_s: float = 20) -> float:
        """Wait until the condition is true. Returns the waiting time in seconds."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, f"not true in time:\n{self.log[-3000:]}"
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    def kill(self, role: str, at: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal to one process and return its pid."""
        pid = self.processes(role)[at].pid
        os.kill(pid, number)
        return pid

    async def command(self, *arguments: str) -> str:
        """Run a `dynamo` command and return its output."""
        code, output = await self.try_command(*arguments)
        assert code == 0, output
        return output

    async def try_command(self, *arguments: str) -> tuple[int | None, str]:
        """Run a `dynamo` command and return its exit code and output."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "dynamo", *arguments, "--deployment", str(self.port)),
            env=self.environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    def metrics(self, record: ProcessRecord) -> dict[str, float]:
        """Return the metrics of one process by name."""
        text = urllib.request.urlopen(f"{record.status_url}/metrics", timeout=5).read().decode()
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        return {name: float(value) for name, value in rows}

    def health(self, record: ProcessRecord) -> str:
        """Return the /health page of one process."""
        return str(urllib.request.urlopen(f"{record.status_url}/health", timeout=5).read())

    def health_body(self, record: ProcessRecord) -> dict[str, Any]:
        """Return the body of /health of one process, also if its status is 503."""
        try:
            page = urllib.request.urlopen(f"{record.status_url}/health", timeout=5)
        except urllib.error.HTTPError as error:
            page = error
        with page:
            return dict(json.load(page))

    async def texts(self, keys: Sequence[int], tokens: int) -> dict[int, str]:
        """Return the answers without faults. Each is requested only once."""
        missing = [key for key in keys if (key, tokens) not in self._reference]
        for answer in await self.ask_all(missing, tokens):
            assert answer.complete, answer
            self._reference[answer.key, tokens] = answer.text
        return {key: self._reference[key, tokens] for key in keys}

    async def ask_all(self, keys: Sequence[int], tokens: int) -> list[Answer]:
        """Request all answers concurrently."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(self.port, key, tokens)) for key in keys]
        return [task.result() for task in tasks]

    async def ask_during(
        self, inject: InjectFault, *, streams: int = 24, tokens: int = 100
    ) -> list[Answer]:
        """Start streams, inject a fault once all have a token, and return their answers."""
        answers = [Answer(key) for key in range(streams)]
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                body = body_of(answer.key, tokens, 8)
                group.create_task(read(self.port, answer, body, 50.0))
            for answer in answers:
                await answer.begun.wait()
            await inject()
        return answers

    async def assert_unaffected(
        self, inject: InjectFault, *, streams: int = 24, tokens: int = 100, pause_s: float
    ) -> str:
        """Inject a fault and assert that every answer is complete and the same as without it.

        No gap may be longer than `pause_s`. Returns a sentence for the table.
        """
        texts = await self.texts(range(streams), tokens)
        answers = await self.ask_during(inject, streams=streams, tokens=tokens)
        for answer in answers:
            assert answer.complete, (answer, self.log[-3000:])
            assert answer.text == texts[answer.key], (answer.text, texts[answer.key])
        longest = max(answer.longest_gap_s for answer in answers)
        assert longest <= pause_s, f"a gap of {longest:.2f} s"
        return f"{streams} of {streams} complete and the same, longest gap {longest * 1e3:.0f} ms"

    def wait_for_exit(self, timeout_s: float) -> int:
        """Wait until the supervisor ends, and return its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(ProcessLookupError):
            for role in self.workers:
                for record in self.processes(role):
                    os.kill(record.pid, signal.SIGKILL)


def _control_terminal() -> None:
    """Make standard error the controlling terminal of this process."""
    fcntl.ioctl(2, termios.TIOCSCTTY, 0)
