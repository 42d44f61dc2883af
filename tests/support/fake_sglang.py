"""The part of SGLang's Engine that the adapter uses, with its shapes and its faults.

`server_args` holds what the caller has given, and the values in effect only after resolution.
Outputs hold all ids or, with `incremental_streaming_output`, the new ones. A request is known only
once its iteration has begun, so that an earlier abort is lost. An abort takes effect a step later.
Equal prompts that are computed at once fill their blocks twice. Block hashes are signed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from tests.support.engine_cache import STYLES, FakeEngineCache
from tests.support.kv_event_publisher import KvEventPublisher

VOCABULARY = 100
CONTEXT_TOKENS = 90
EOS = 2


def next_token(ids: list[int]) -> int:
    """Return the greedy next token, which depends on all ids before."""
    return 3 + sum((index + 1) * token for index, token in enumerate(ids)) % (VOCABULARY - 3)


class FakeTokenizerManager:
    def __init__(self, engine: FakeSglang) -> None:
        self._engine = engine
        self.model_config = SimpleNamespace(
            context_len=CONTEXT_TOKENS, get_default_sampling_params=lambda: {"top_p": 0.75}
        )
        self.aborted: list[str] = []

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)
        if rid in self._engine.running:
            self._engine.running[rid] = "abort"

    async def get_internal_state(self) -> list[dict[str, Any]]:
        limit = self._engine.server_args.max_running_requests
        return [{"effective_max_running_requests_per_dp": limit or 48}]

    async def flush_cache(self) -> Any:
        if self._engine.running:
            return SimpleNamespace(success=False)
        self._engine.cache.reset()
        self._engine.cache.drain()  # the event comes with the next step
        self._engine.was_reset = True
        return SimpleNamespace(success=True)


class FakeServerArgs(SimpleNamespace):
    """`ServerArgs` of 0.5.23."""

    def resolved_dict(self) -> dict[str, Any]:
        return {**vars(self), "chunked_prefill_size": 2048, **FakeSglang.resolution}


class FakeSglang:
    """`sglang.Engine`. `started` has every instance. `next_failure` replaces the end of a request:
    a finish reason, or an exception that its iteration raises. `resolution`: arguments that SGLang
    decides."""

    started: list[FakeSglang] = []  # noqa: RUF012
    resolution: dict[str, Any] = {}  # noqa: RUF012
    block_tokens = 4

    def __init__(self, model_path: str, **arguments: Any) -> None:
        if "wrong" in arguments:
            raise TypeError("ServerArgs.__init__() got an unexpected keyword argument 'wrong'")
        self.arguments = {"model_path": model_path, **arguments}
        defaults = {
            "page_size": 1,
            "skip_tokenizer_init": False,
            "enable_lora": False,
            "max_running_requests": None,
            "chunked_prefill_size": None,
            "disable_radix_cache": False,
            "incremental_streaming_output": False,
        }
        self.server_args = FakeServerArgs(**{**defaults, **arguments})
        self.tokenizer_manager = FakeTokenizerManager(self)
        self._scheduler_init_result = SimpleNamespace(
            scheduler_infos=[{"max_total_num_tokens": 64 * self.server_args.page_size}]
        )
        self.child = subprocess.Popen(["sleep", "1000"])
        self.running: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.next_failure: Any = None
        self.was_reset = False
        self.cache = FakeEngineCache(STYLES["sglang_0.5"], self.server_args.page_size, 64)
        config = json.loads(arguments["kv_events_config"])
        self.publisher = KvEventPublisher(config["endpoint"], config["replay_endpoint"])
        self.started.append(self)

    def get_all_child_pids(self) -> list[int]:
        return [self.child.pid]

    def shutdown(self) -> None:
        self.child.kill()
        self.child.wait()
        self.publisher.stop()

    async def async_generate(self, **request: Any) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        return self._generate(**request)

    async def _generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        rid: str,
        stream: bool,
        cache_salt: str = "",
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(0)  # tokenizes; an abort before this is lost
        self.running[rid] = "running"
        try:
            await asyncio.sleep(0)
            twins = sum(1 for other in self.running.values() if other == "running")
            cached = self.cache.compute(input_ids, cache_salt, min(twins, 2))
            ids = list(input_ids)
            failure, self.next_failure = self.next_failure, None
            for number in range(1, sampling_params["max_new_tokens"] + 1):
                ids.append(next_token(ids))
                reason = self._finish_reason(rid, ids[-1], number, sampling_params)
                if failure is not None and number == 2:
                    if isinstance(failure, Exception):
                        raise failure
                    reason = failure
                self._step(input_ids, ids, cache_salt)
                new = ids[len(input_ids) :]
                incremental = self.server_args.incremental_streaming_output
                meta = {
                    "id": rid,
                    "finish_reason": reason,
                    "prompt_tokens": len(input_ids),
                    "completion_tokens": number,
                    "cached_tokens": cached,
                }
                if return_logprob:
                    logprobs = [(-0.5, token, None) for token in new]
                    tops = [[(-0.5, token, None), (-1.5, 1, None)] for token in new]
                    meta |= {"output_token_logprobs": logprobs}
                    meta |= {"output_top_logprobs": tops if top_logprobs_num else None}
                yield {"output_ids": new[-1:] if incremental else new, "meta_info": meta}
                if reason is not None:
                    return
                await asyncio.sleep(0.001)
        finally:
            del self.running[rid]

    def _finish_reason(
        self, rid: str, token: int, number: int, sampling: dict[str, Any]
    ) -> dict[str, Any] | None:
        if self.running[rid] == "abort":
            return {"type": "abort", "message": "Aborted by AbortReq."}
        stops = {*sampling["stop_token_ids"], *(() if sampling["ignore_eos"] else (EOS,))}
        if token in stops and number >= sampling["min_new_tokens"]:
            return {"type": "stop", "matched": token}
        if number == sampling["max_new_tokens"]:
            return {"type": "length", "length": number}
        return None

    def _step(self, prompt: list[int], ids: list[int], salt: str) -> None:
        """Publish what the step has stored. KV of the last token comes with the next one."""
        if self.was_reset:
            self.was_reset = False
            payload = self.cache.style.batch([{"type": "AllBlocksCleared"}, *self.cache.drain()])
            import msgspec

            self.publisher.publish(msgspec.msgpack.encode(payload))
        self.cache.compute(ids[:-1], salt)
        events = self.cache.drain_payload()
        self.publisher.publish(events)
