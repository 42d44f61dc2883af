"""The modes without a solver, by their policies: adaptive, and load balancing with ranks, roles or
admission."""

from __future__ import annotations

from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from random import Random
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from dynamo.communication.events import Events
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.values import GenerateRequest, KvEvent, Load
from dynamo.operations.replay.fast.admission import SAMPLING, STOPS, InstanceSet
from dynamo.operations.replay.fast.choosers import ChooserInputs, LedgerChooser
from dynamo.operations.replay.fast.request import FastRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance, InstanceFilter
from dynamo.runtime.calls.load_balancing import InstanceLoad, LoadBalancer
from dynamo.scheduling.migration import ATTEMPT_STRIDE
from dynamo.scheduling.router.attempt import RankBalancer
from dynamo.scheduling.router.factory import open_policy
from dynamo.scheduling.router.features import decodes, only_prefills
from dynamo.scheduling.router.policy import Decision, PolicyInputs
from dynamo.scheduling.workers.prompt import Prompt

T = TypeVar("T")


class PolicyChooser(LedgerChooser):
    """A mode whose policy chooses at once, as the router calls it. The router chooses ranks."""

    def __init__(self, inputs: ChooserInputs, block_tokens: int) -> None:
        super().__init__(inputs)
        count, rng = self.ledger.workers.count, inputs.rng
        self._clients = _Client(decodes, rng, count), _Client(only_prefills, rng, count)
        clients = [cast("Client", client) for client in self._clients]
        no_events = cast("Events", None)  # modes without a solver read none
        shared = inputs.settings, clients[0], no_events, inputs.heap, self.ledger, block_tokens
        self._policy = _run(open_policy(PolicyInputs(*shared, prefill_client=clients[1])))
        self._ranks = RankBalancer(self.ledger.workers)
        if inputs.admits:
            self._open_admission(self._policy)
        self.update_instances(inputs.instances)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        super().update_instances(instances)
        for client in self._clients:
            client.update(instances)
        if self._admission is not None:
            self._admission.update_instances(instances)

    def _submit(self, request: FastRequest) -> None:
        if not self._can_answer:
            self._hold_pending(request)
            return
        try:
            decision = self._decide(request, request.excluded)
        except NoWorkers:
            decision = self._decide(request, frozenset())
        ledger, states, prefill = self.ledger, self.ledger.workers, decision.prefill
        prompt = Prompt(request.length, ())
        placed = ledger.place(
            f"{request.row}/0/{request.moves * ATTEMPT_STRIDE}",
            states.at(decision.instance, decision.rank),
            prompt,
            None if prefill is None else states.at(prefill, decision.prefill_rank),
            new_tokens=decision.new_tokens or prompt.tokens,
            max_tokens=STOPS.max_tokens - request.recomputed,
        )
        self._send_placed(request, placed)

    def _decide(self, request: FastRequest, excluded: frozenset[str]) -> Decision:
        name = str(request.row)
        generate = GenerateRequest(name, "", bytes(request.length * TOKEN_BYTES), SAMPLING, STOPS)
        decision = _run(self._policy.choose(generate, Context(name), excluded))
        choose, prefill = self._ranks.choose, decision.prefill
        if decision.rank is None:
            decision = replace(decision, rank=choose(decision.instance, excluded))
        if prefill is not None:
            decision = replace(decision, prefill_rank=choose(prefill, excluded))
        return decision

    def _on_load(self, worker: str, load: Load, now: float) -> None:
        self._policy.on_load_report(worker, load, now)

    def on_kv_events(self, worker: str, events: Sequence[KvEvent]) -> None:
        pass


class _Client(InstanceSet):
    """The part of a client that policies use."""

    def __init__(self, accepts: InstanceFilter, rng: Random, count: Callable[[str], int]) -> None:
        super().__init__(accepts)
        self.in_flight = count
        self._balancer = LoadBalancer(rng, count)

    def update(self, instances: Mapping[str, Instance]) -> None:
        accepted = [each for each in instances.values() if self._accepts(each)]
        self._balancer.set_candidates([InstanceLoad(each) for each in accepted])
        super().update(instances)

    def pick(self, mode: str, allowed: Container[str] | None = None) -> Instance:
        """Pick an instance by `mode`, among the ids in `allowed`."""
        return self._balancer.pick(mode, allowed).instance

    def no_workers_error(self, *_: str) -> NoWorkers:
        """Return the error of a request without any worker."""
        return NoWorkers("no worker may get this request")


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a policy waits in a fast replay")
