"""A placed request in the router's model of its worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dynamo.scheduling.router.placement_handle import Placement
from dynamo.scheduling.router.prompt import Prompt

if TYPE_CHECKING:
    from dynamo.scheduling.router.worker_state import WorkerState


class PlacedRequest(Placement):
    """A request on its worker, until it ends. `updates_model`: whether measured times update the
    latency model. `decode_worker`: the worker to which the request moves with its first token, if
    that is another one. The callbacks receive this object."""

    __slots__ = (
        "decode_worker",
        "end_callback",
        "expected_first_token_s",
        "first_token_callback",
        "placed_s",
        "prefill_ms_at_first_token",
        "updates_model",
        "worker",
    )

    def __init__(
        self, request_key: str, worker: WorkerState, prompt: Prompt, new_tokens: int, now: float
    ) -> None:
        super().__init__(request_key, prompt, new_tokens)
        self.worker = worker
        self.decode_worker: WorkerState | None = None
        self.placed_s = now
        self.expected_first_token_s = now
        self.prefill_ms_at_first_token = 0.0
        self.updates_model = True
        self.first_token_callback: Callable[[PlacedRequest], None] = _ignore
        self.end_callback: Callable[[PlacedRequest], None] = _ignore

    def on_first_token(self) -> None:
        self.first_token_callback(self)

    def end(self) -> None:
        self.end_callback(self)


def _ignore(placed: PlacedRequest) -> None:
    del placed
