"""The ready-made services as graphs name them: `from dynamo.services import Frontend, ...`.

A class of them says what stands in a graph, not how it works. A subclass with a decorator of its
own gives another name, replicas and configuration.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from dynamo.core.errors import Unsupported
from dynamo.sdk import dynamo_endpoint, service


@service()
class Frontend:
    """OpenAI's API over HTTP."""

    dynamo_role: ClassVar[str] = "frontend"


@service()
class Processor:
    """Chat requests in text, answered by the model's workers. It runs in the frontend's process."""

    dynamo_role: ClassVar[str] = "processor"

    @dynamo_endpoint("chat/completions")
    async def chat(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """OpenAI's chat request (`model` may be left out: the first one), answered by its chunks:
        the first carries the prompt's length under `usage`, the last the whole usage."""
        for chunk in _not_running(request):
            yield chunk

    @dynamo_endpoint("chat/answer")
    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The same request, answered at once: `content`, `finish_reason`, `usage`."""
        answer: dict[str, Any] = _not_running(request)
        return answer


@service()
class Router:
    """Which worker gets a request. It runs in the frontend's process; a class made of it, or
    `router.replicas`, gives it processes of its own."""

    dynamo_role: ClassVar[str] = "router"


@service()
class Worker:
    """A model and its engine."""

    dynamo_role: ClassVar[str] = "worker"


def _not_running(request: dict[str, Any]) -> Any:
    raise Unsupported(
        f"a request with {', '.join(request)} at a Processor that nobody runs",
        hint="let `dynamo serve` start it, or give a fake to dynamo.testing.local_graph",
    )
