"""The part of TensorRT-LLM's LLM that the adapter uses, with its shapes and its faults.

Results are one object that changes with each step. Token ids of stop words are removed from the
output, the end id is not. An abort takes effect a step later. Events are polled from a buffer that
drops the oldest, tell no salts, have partial blocks, and come for each attention window. There are
none before the first request: 1.0 asserts it. Polls after the death of a worker return nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.engine_cache import FakeEngineCache, Style
from tests.support.external_inputs import install_module
from tests.support.fake_sglang import next_token


class SamplingParams:
    known = frozenset(
        (
            *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty", "end_id"),
            *(
                "stop_token_ids",
                "ignore_eos",
                "detokenize",
                "logprobs",
                "guided_decoding",
                "top_p_min",
            ),
        )
    )

    def __init__(self, **fields: Any) -> None:
        if unknown := fields.keys() - self.known:
            raise TypeError(f"unexpected keyword arguments {sorted(unknown)}")
        self.__dict__.update({"logprobs": None, **fields})


def _event(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    if kind == "BlockRemoved":
        return {"type": "removed", "block_hashes": fields["block_hashes"]}
    size, ids = fields["block_size"], fields["token_ids"]
    blocks = [
        {
            "block_hash": key,
            "tokens": [
                {"token_id": token, "token_extra_id": 0} for token in ids[start : start + size]
            ],
            "cache_level": 0,
            "priority": 35,
        }
        for key, start in zip(fields["block_hashes"], range(0, len(ids), size), strict=True)
    ]
    partial = {"block_hash": 7, "tokens": [{"token_id": 5, "token_extra_id": 0}]}
    parent = fields["parent_block_hash"]
    return {"type": "stored", "parent_hash": parent, "blocks": [*blocks, partial]}


STYLE = Style(lambda digest: int.from_bytes(digest[:8], "big"), _event)


class FakeResult:
    def __init__(self, llm: FakeLlm, prompt: list[int], sampling: Any, **options: Any) -> None:
        self._llm, self._prompt, self._sampling, self._options = llm, prompt, sampling, options
        self.outputs = [
            SimpleNamespace(
                index=0,
                token_ids=[],
                logprobs=[],
                finish_reason=None,
                stop_reason=None,
            )
        ]
        self.finished = False
        self.cached_tokens = 0
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True
        if self not in self._llm.abandoned:
            self._llm.abandoned.append(self)

    async def __anext__(self) -> FakeResult:
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(0.001)
        if self._llm.dead:
            await asyncio.Event().wait()
        streaming = self._options["streaming"]
        while not self.finished:
            self._step()
            if streaming:
                break
        return self

    def _step(self) -> None:
        llm, output, sampling = self._llm, self.outputs[0], self._sampling
        salt = self._options.get("cache_salt", "")
        if not output.token_ids:
            self.cached_tokens = llm.cache.compute(self._prompt, salt)
        ids = [*self._prompt, *output.token_ids]
        token = next_token(ids)
        output.token_ids.append(token)
        if sampling.logprobs:
            entry = SimpleNamespace(logprob=-0.5, rank=1)
            output.logprobs.append({token: entry, 1: SimpleNamespace(logprob=-1.5, rank=2)})
        llm.cache.compute(ids, salt)
        llm.publish()
        self.finished = True
        if llm.next_failure is not None and len(output.token_ids) == 2:
            failure, llm.next_failure = llm.next_failure, None
            raise failure
        if self._aborted:
            output.finish_reason = "cancelled"
        elif token in sampling.stop_token_ids:
            output.finish_reason, output.stop_reason = "stop", token
            output.token_ids.pop()
        elif token == sampling.end_id and not sampling.ignore_eos:
            output.finish_reason = "stop"
        elif len(output.token_ids) == sampling.max_tokens:
            output.finish_reason = "length"
        else:
            self.finished = False


class FakeLlm:
    """`tensorrt_llm.LLM`. `started` has every instance. `next_failure` is raised by the second step
    of a request, `refusal` by the call that begins one. `requests` are those after the engine's
    own first one. With `dead` nothing is computed and polls return nothing. With `asserts` they
    fail before the first request, as in 1.0."""

    started: list[FakeLlm] = []  # noqa: RUF012
    asserts = True

    def __init__(self, model: str, kv_cache_config: Any, **arguments: Any) -> None:
        if "wrong" in arguments:
            raise ValueError("wrong: Extra inputs are not permitted")
        self.model, self.config, self.arguments = model, kv_cache_config, arguments
        self.args = SimpleNamespace(max_seq_len=90, max_batch_size=None, max_num_tokens=8192)
        self.cache = FakeEngineCache(STYLE, kv_cache_config.tokens_per_block, 64)
        self.abandoned: list[FakeResult] = []
        self.calls: list[dict[str, Any]] = []
        self.worker = subprocess.Popen(["sleep", "1000"])
        self.helper = subprocess.Popen(["sleep", "1000"])
        self.shut_down = False
        self.next_failure: Exception | None = None
        self.refusal: Exception | None = None
        self._number = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=kv_cache_config.event_buffer_max_size)
        self._add({"type": "created", "num_blocks_per_cache_level": [64, 0]}, 8192)
        self._add({"type": "created", "num_blocks_per_cache_level": [64, 0]}, 512)
        self.started.append(self)

    def generate_async(self, inputs: list[int], sampling_params: Any, **options: Any) -> FakeResult:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append({"sampling": sampling_params, **options})
        return FakeResult(self, inputs, sampling_params, **options)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return self.calls[1:]

    @property
    def dead(self) -> bool:
        return self.worker.poll() is not None

    def kill_worker(self) -> None:
        self.worker.kill()
        self.worker.wait()

    def _check_health(self) -> bool:
        return not self.shut_down

    def get_kv_cache_events(self, timeout: float) -> list[dict[str, Any]]:
        if not self.calls:
            assert not self.asserts, "KV Event IterationResult is not properly instantiated."
            return []
        if self.dead or not self._events:
            time.sleep(min(timeout, 0.01))
        if self.dead:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def publish(self) -> None:
        """Add what the cache has stored and removed, for both attention windows."""
        for data in self.cache.drain():
            self._add(data, 8192)
            self._add(data, 512)

    def lose_event(self) -> None:
        """Skip the number of an event, as when the buffer overflows."""
        self._number += 1

    def shutdown(self) -> None:
        self.shut_down = True
        for process in (self.worker, self.helper):
            process.kill()
            process.wait()

    def _add(self, data: dict[str, Any], window: int) -> None:
        self._events.append({"event_id": self._number, "window_size": window, "data": data})
        self._number += 1


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of `tensorrt_llm` find the fake."""
    install_module(monkeypatch, "tensorrt_llm", LLM=FakeLlm, SamplingParams=SamplingParams)
    install_module(monkeypatch, "tensorrt_llm.llmapi", KvCacheConfig=SimpleNamespace)
    for name, members in {
        "sampling_params": {"GuidedDecodingParams": SimpleNamespace},
        "scheduling_params": {"SchedulingParams": SimpleNamespace},
    }.items():
        install_module(monkeypatch, f"tensorrt_llm.{name}", **members)
