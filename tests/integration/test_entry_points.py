"""`python -m dynamo.frontend`, `python -m dynamo.mocker` and engines of users as separate
processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import free_port, until
from tests.support.servers import EtcdProcess, NatsProcess

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ENGINE = '''
import argparse
import asyncio
import os

from dynamo._core import Context
from dynamo.common.backend import (
    EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, WorkerConfig
)
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.backend.run import run


class Counter(LLMEngine):
    """Answers with ids down to 5, and says on standard output what the worker calls."""

    def __init__(self, model):
        self.model, self.publisher = model, None

    @classmethod
    async def from_args(cls, argv=None):
        parser = argparse.ArgumentParser()
        parser.add_argument("--model")
        parser.add_argument("--discovery-backend", default=os.environ["DYN_DISCOVERY_BACKEND"])
        args = parser.parse_args(argv)
        config = WorkerConfig(
            namespace="dynamo", component="counter", model_name=args.model,
            served_model_name="tiny", discovery_backend=args.discovery_backend,
            request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        )
        return cls(args.model), config

    async def start(self, worker_id: int) -> EngineConfig:
        print("start", worker_id > 0, flush=True)
        limits = LlmRegistration(context_length=256, kv_cache_block_size=16, max_num_seqs=4)
        return EngineConfig(model=self.model, llm=limits)

    async def kv_event_sources(self) -> list[KvEventSource]:
        def keep(publisher):
            self.publisher = publisher

        return [PushSource(on_ready=keep, dp_rank=0)]

    async def generate(self, request: GenerateRequest, context: Context):
        prompt = request["token_ids"]
        self.publisher.publish_stored(prompt[:16], [16], [1], parent_hash=None)
        for left in reversed(range(request["stop_conditions"]["max_tokens"])):
            if context.is_stopped():
                return
            end = {} if left else {"finish_reason": "length"}
            yield {"token_ids": [5 + left], "index": 0, **end}
            await asyncio.sleep(0.01)

    async def abort(self, context: Context) -> None:
        print("abort", bool(context.id()), flush=True)

    async def cleanup(self) -> None:
        print("cleanup", flush=True)


run(Counter)
'''


class Processes:
    """Processes that share an environment. All are killed at the end."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._folder = folder
        self._environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder), **environ}
        self._port = free_port()
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `python WORD ...`."""
        command = [sys.executable, *words]
        with (self._folder / f"{len(self._running)}.log").open("wb") as log:
            process = subprocess.Popen(command, env=self._environ, stdout=log, stderr=log)
        self._running.append(process)
        return process

    def start_frontend(self, *arguments: str) -> None:
        """Start a frontend, which `get` and `chat` ask."""
        self.start("-m", "dynamo.frontend", "--http-port", str(self._port), *arguments)

    def log(self, process: subprocess.Popen[bytes]) -> str:
        """Return what a process printed."""
        return (self._folder / f"{self._running.index(process)}.log").read_text()

    def leave_after_first_token(self, body: dict[str, Any]) -> None:
        """Send a streamed chat, and close the connection when its first token is there."""
        url = f"http://127.0.0.1:{self._port}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            next(line for line in answer if b'"logprobs":{' in line or b'"content":"' in line)

    def send(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60
    ) -> tuple[int, Any]:
        """Return status and body of a request. Status 0: no answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", body and json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except TimeoutError:
            raise
        except OSError:
            return 0, {}

    def workers(self) -> int:
        """Return how many workers the frontend sees."""
        workers: dict[str, int] = self.send("/health")[1].get("workers", {})
        return workers.get(CHAT["model"], 0)

    def close(self) -> None:
        """Kill all processes. Blocks."""
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture(params=["file", "etcd"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    """Processes that find each other by a folder, or by etcd and NATS."""
    with ExitStack() as stack:
        environ = {}
        if request.param == "etcd":
            etcd = stack.enter_context(EtcdProcess())
            nats = stack.enter_context(NatsProcess())
            environ = {
                "ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
                "NATS_SERVER": f"nats://127.0.0.1:{nats.port}",
                "DYN_REQUEST_PLANE": "nats",
            }
        processes = Processes(tmp_path, {**environ, "DYN_DISCOVERY_BACKEND": request.param})
        stack.callback(processes.close)
        yield processes


def test_workers_of_other_processes_answer_until_the_last_is_killed(
    processes: Processes, tiny_model: Path
) -> None:
    flags = ("--model-path", str(tiny_model), "--model-name", "tiny", "--speedup-ratio", "0")
    processes.start_frontend("--router-mode", "kv")
    first = processes.start("-m", "dynamo.mocker", *flags)
    second = processes.start("-m", "dynamo.mocker", *flags)
    until(lambda: processes.workers() == 2, timeout_s=60)
    assert processes.send("/v1/chat/completions", CHAT)[0] == 200

    first.kill()
    for _ in range(4):
        status, answer = processes.send("/v1/chat/completions", CHAT)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 3
    until(lambda: processes.workers() == 1, timeout_s=60)
    assert second.poll() is None


def test_a_users_engine_serves_until_it_is_stopped(
    processes: Processes, tiny_model: Path, tmp_path: Path
) -> None:
    program = tmp_path / "counter.py"
    program.write_text(ENGINE)
    processes.start_frontend()
    engine = processes.start(str(program), "--model", str(tiny_model))
    until(lambda: processes.workers() == 1, timeout_s=60)

    status, answer = processes.send("/v1/chat/completions", {**CHAT, "logprobs": False})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3), answer
    assert answer["choices"][0]["finish_reason"] == "length"
    processes.leave_after_first_token({**CHAT, "max_tokens": 200, "stream": True})
    engine.terminate()
    assert engine.wait(30) == 0
    calls = processes.log(engine).splitlines()
    reports = [line for line in calls if line.startswith(("start", "abort", "cleanup"))]
    assert reports == ["start True", "abort True", "cleanup"]
