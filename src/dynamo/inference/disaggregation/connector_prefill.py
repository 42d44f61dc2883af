"""Prefill and decode workers whose engines move KV by connectors of their own.

A call of the endpoint `prefill` carries a `PrefillRequest`, and is answered with a `ComputedPrompt`
when the prompt is computed. The engine of the caller then loads the KV by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import DECODE_ERRORS, DynamoError, ProtocolError, TransferFailed
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.kv_events import split_worker_name
from dynamo.inference.disaggregation.messages import PrefillRequest, encode_prefill_request
from dynamo.inference.disaggregation.peer_prefill import PromptTime
from dynamo.inference.disaggregation.remote_prefill import RemotePrefill
from dynamo.inference.kv_source import ArrivalCounters, count_fallback
from dynamo.inference.worker_metrics import declare_remote_prompt_metrics
from dynamo.models.card import BlockIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.communication.requests import ResponseWriter
    from dynamo.core.context import Context
    from dynamo.core.reply import Engine, KvConnector, Reply
    from dynamo.core.values import GenerateRequest
    from dynamo.runtime.calls.client import Client
    from dynamo.runtime.calls.instances import Instance
    from dynamo.runtime.component import Component, ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime

CONNECTOR_KEY = "kv_connector"
"""Capability of an instance: the kind of its engine's connector."""
LEASE_SHARE = 0.5
"""The share of a lease in which the KV of a prompt may still be given to an engine."""


class ComputedPrompt(msgspec.Struct, frozen=True):
    """The KV of a prompt, which took `computed_s` and is kept for `lease_s` from then on."""

    kv: bytes
    computed_s: float
    lease_s: float


_encode_prompt = msgspec.msgpack.Encoder().encode
_decode_prompt = msgspec.msgpack.Decoder(ComputedPrompt).decode


class ConnectorPrefill(RemotePrefill):
    """Computes prompts for other workers of the component, and answers requests whose prompts they
    have computed. Whatever fails on the way, this worker computes the prompt itself."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        component: Component,
        engine: Engine,
        connector: KvConnector,
    ) -> None:
        super().__init__(runtime, component)
        self._engine = engine
        self._connector = connector
        self._counters = ArrivalCounters()
        self._prompt_time = PromptTime()
        self._client: Client

    @property
    def capabilities(self) -> Mapping[str, Any]:
        return {CONNECTOR_KEY: self._connector.kind}

    async def serve(
        self, capabilities: Mapping[str, Any], on_load_changed: Callable[[], None]
    ) -> Sequence[ServedEndpoint]:
        runtime = self._runtime
        blocks = msgspec.convert(capabilities["blocks"], BlockIdentity)

        def is_candidate(instance: Instance) -> bool:
            theirs, names = instance.capabilities, ("model", CONNECTOR_KEY)
            if instance.id == runtime.instance_id or any(
                theirs.get(name) != capabilities[name] for name in names
            ):
                return False
            with suppress(msgspec.ValidationError):  # an error would end the watch of all workers
                identity = msgspec.convert(theirs.get("blocks", {}), BlockIdentity)
                return not blocks.describe_differences(identity)
            return False

        self._client = await self._follow(is_candidate)
        declare_remote_prompt_metrics(runtime.metrics, self._read_counters)
        return (await self._serve(capabilities, on_load_changed),)

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Answer a request with the prompt of its prefill worker."""
        kv = b""
        worker = split_worker_name(request.prefill)[0] if request.prefill else ""
        remote = worker and worker != self._runtime.instance_id
        if remote and request.prompt_logprobs is None:  # KV of others has no logits
            kv = await self._fetch(request, context)
        await self._engine.generate(replace(request, kv=kv) if kv else request, context, reply)

    async def _compute(self, call: PrefillRequest, outgoing: ResponseWriter) -> None:
        clock = self._runtime.clock
        started_s = clock.now()
        kv = await self._connector.prefill(call.request, outgoing.context)
        outgoing.send(
            _encode_prompt(ComputedPrompt(kv, clock.now() - started_s, self._connector.lease_s))
        )

    async def _fetch(self, request: GenerateRequest, context: Context) -> bytes:
        """Return the KV of a prompt that its prefill worker has computed, or nothing."""
        clock, counters = self._runtime.clock, self._counters
        started_s = clock.now()
        counters.prompts += 1
        try:
            return await self._call(request, context, started_s)
        except DynamoError as error:
            count_fallback(counters, error, request.request_id, request.prefill)
            return b""
        finally:
            counters.wait_s += clock.now() - started_s

    async def _call(self, request: GenerateRequest, context: Context, started_s: float) -> bytes:
        """Call the prefill worker. Its answer holds for the incarnation that was called and until
        its lease ends: an engine that loads other blocks may die of it."""
        client, clock, answers = self._client, self._runtime.clock, list[bytes]()
        instance_id, rank = split_worker_name(request.prefill)
        instance = client.instances.get(instance_id)
        if instance is None:
            raise _failed("gone", request, "is not known here")
        tokens = len(request.token_ids) // TOKEN_BYTES
        call = PrefillRequest(replace(request, group=None, rank=rank, prefill="", kv_from=""))
        payload = encode_prefill_request(call)

        def receive(answer: bytes) -> bool:
            answers.append(answer)
            return True

        used = False
        try:
            async with asyncio.timeout(self._prompt_time.limit_s(tokens)):
                await client.call(instance, payload, context, receive)
            self._prompt_time.on_computed(tokens, clock.now() - started_s)
            prompt = _decode_answer(answers)
            present = client.instances.get(instance.id)
            if present is None or present.address != instance.address:
                raise _failed("gone", request, "has left")
            age_s = clock.now() - started_s - prompt.computed_s
            if age_s > prompt.lease_s * LEASE_SHARE:
                raise _failed("stale", request, f"computed the prompt {age_s:.1f} s ago")
            used = True
        except TimeoutError:
            elapsed_s = clock.now() - started_s
            self._prompt_time.on_computed(tokens, elapsed_s)
            raise _failed("timeout", request, f"took longer than {elapsed_s:.1f} s") from None
        finally:
            if not used:
                for answer in answers:
                    with suppress(ProtocolError, *DECODE_ERRORS):  # the call has ended by an error
                        self._connector.release(_decode_prompt(answer).kv)
        return prompt.kv

    def _read_counters(self) -> Sequence[ArrivalCounters]:
        """Return the failures here and those that the engine reports later."""
        return (self._counters, ArrivalCounters(fallbacks=self._connector.failures))


def _decode_answer(answers: Sequence[bytes]) -> ComputedPrompt:
    try:
        (answer,) = answers
        return _decode_prompt(answer)
    except (ValueError, *DECODE_ERRORS) as error:
        raise ProtocolError(f"a prefill worker sent a wrong answer: {error}") from error


def _failed(reason: Any, request: GenerateRequest, text: str) -> TransferFailed:
    return TransferFailed.of(reason, f"prefill worker {request.prefill} {text}")
