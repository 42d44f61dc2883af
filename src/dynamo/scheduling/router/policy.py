"""The interface of a routing policy, and the policies that ignore what workers hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from dynamo.communication.events import Events
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.kv_events import worker_name
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import GenerateRequest, Load
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.load_balancing import canonical_mode
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.features import excluded_workers
from dynamo.scheduling.router.harm_steering import HarmSteering
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt, PromptReader
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.telemetry.story import Candidate


def no_workers_error(client: Client) -> NoWorkers:
    """Return the error that no worker can be chosen, with the reason."""
    return client.no_workers_error("worker", "this model")


CandidateTable = Callable[[], Sequence[Candidate]]
"""Returns the candidates of a decision. Most tables are never read, and so never built."""


class Decision(msgspec.Struct, frozen=True):
    """The choice of an instance for one request. `candidates`: number of instances considered.
    `cost_table` returns the best of them with their costs at that moment, best first.
    `overlap_blocks`: leading blocks of the prompt that the instance should hold. `waited_s`: time
    held in the router. `view`: how the instance's cache is known (exact, stale, approximate; ""
    when the policy did not look). `rank`: the data-parallel rank on an instance with several.
    `queue_length`: requests still held in the router. `prefill`, `prefill_rank`: those that compute
    the prompt, if others. `prompt`, `new_tokens`: the prompt, and how many of its tokens are
    computed (0: all), where the policy knows. `placement`: the ledger's entry, where the policy has
    made it with the choice. `harm_weight`: the price of a pause for answers, if it is steered so
    that gaps between tokens stay below `itl_slo_ms`."""

    instance: Instance
    mode: str
    candidates: int
    cost_table: CandidateTable = tuple
    overlap_blocks: int = 0
    prompt_blocks: int = 0
    best_overlap_blocks: int = 0
    predicted_ttft_s: float | None = None
    waited_s: float = 0.0
    view: str = ""
    placement: PlacedRequest | None = None
    rank: int | None = None
    queue_length: int = 0
    prefill: Instance | None = None
    harm_weight: float | None = None
    itl_slo_ms: float = 0.0
    prefill_rank: int | None = None
    prompt: Prompt | None = None
    new_tokens: int = 0

    @property
    def worker(self) -> str:
        """The name of the instance, or of its rank, in worker states."""
        return worker_name(self.instance.id, self.rank)

    @property
    def prefill_worker(self) -> str:
        """The name of the worker that computes the prompt; "" if it is the same one."""
        return "" if self.prefill is None else worker_name(self.prefill.id, self.prefill_rank)


class PolicyInputs(msgspec.Struct, frozen=True):
    """The arguments of every router mode. The policy chooses among the instances of `client`, whose
    workers have blocks of `block_tokens` tokens and whose requests `ledger` has. `read_prompt` and
    `view` replace the prompt reader and the cache view of mode kv. `prefill_client`: the workers
    that only compute prompts."""

    settings: RouterSettings
    client: Client
    events: Events
    clock: Clock
    ledger: Ledger
    block_tokens: int
    read_prompt: PromptReader | None = None
    view: CacheView | None = None
    prefill_client: Client | None = None

    @property
    def component(self) -> str:
        """The path of the workers' component, below which they publish events."""
        return self.client.path.rsplit(".", 1)[0]


class Policy(ABC):
    """Choose an instance for each request."""

    @abstractmethod
    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        """Return a decision for an instance whose id is not in `tried`. Nor is the name of its
        rank, if the policy chooses ranks. A policy may hold the request for a better moment.
        Raises `NoWorkers`."""

    async def close(self) -> None:  # noqa: B027 - most policies hold nothing
        """Release resources. Requests that are still held fail with `NoWorkers`."""

    @property
    def waiting(self) -> int:
        """The number of requests held for a better moment."""
        return 0

    @property
    def predicts(self) -> bool:
        """Whether the policy chooses the worker of each prompt by predicted times."""
        return False

    @property
    def harm_steering(self) -> HarmSteering | None:
        """The steering of the price of pauses; None where the price is constant."""
        return None

    def predict_pair_ms(
        self, workers: Sequence[WorkerState], tokens: int, ahead: int, now: float
    ) -> float | None:
        """Return the milliseconds to the first token of a prompt behind `ahead` others that are
        not placed; None unless the policy may choose two of `workers` for it."""
        del workers, tokens, ahead, now
        return None

    def cache_view_modes(self) -> Mapping[str, str]:
        """Return how each worker's cache is known: exact, stale, approximate or none."""
        return {}

    def router_states(self) -> Mapping[str, str]:
        """Return the state of each remote router by its id."""
        return {}

    def on_load_report(self, worker: str, load: Load, now: float) -> None:  # noqa: B027
        """Receive a worker's load report (a `LoadListener`); most policies ignore them."""

    def update_settings(self, settings: RouterSettings) -> None:  # noqa: B027
        """Apply reloaded settings; most policies have none that can be reloaded."""


class BasicPolicy(Policy):
    """The load-balancing modes of the runtime's client, such as round_robin."""

    def __init__(self, client: Client, mode: str) -> None:
        """`mode` is a setting's value; `-` and `_` are equal. Raises ConfigError for others."""
        self._client = client
        self._mode = canonical_mode(mode)

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        del request
        live = self._client.instances
        if live and not tried and not context.metadata:
            return Decision(self._client.pick(self._mode), self._mode, len(live))
        allowed = live.keys() - tried - excluded_workers(live, context)
        if not allowed:
            raise no_workers_error(self._client)
        return Decision(self._client.pick(self._mode, allowed), self._mode, len(allowed))
