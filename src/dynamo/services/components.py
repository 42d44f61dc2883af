"""The ready-made services as graph nodes: `from dynamo.services import Frontend, ...`.

These classes only stand for the processes. A decorated subclass sets another name, replicas and
configuration.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from dynamo.core.errors import Unsupported
from dynamo.sdk import dynamo_endpoint, service


@service()
class Frontend:
    """The OpenAI API over HTTP."""

    dynamo_role: ClassVar[str] = "frontend"


@service()
class Processor:
    """Answers chat requests of services by the model's workers, in the frontend's process."""

    dynamo_role: ClassVar[str] = "processor"

    @dynamo_endpoint("chat/completions")
    async def chat(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer OpenAI's chat request with its chunks.

        Without `model`, the first model answers. The first chunk has the prompt's length under
        `usage`, the last one the whole usage.
        """
        for chunk in _not_running(request):
            yield chunk

    @dynamo_endpoint("chat/answer")
    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer OpenAI's chat request at once: `content`, `finish_reason`, `usage`."""
        answer: dict[str, Any] = _not_running(request)
        return answer


@service()
class Router:
    """Chooses the worker of each request, in the frontend's process.

    A decorated subclass, or `router.replicas`, runs routers in their own processes.
    """

    dynamo_role: ClassVar[str] = "router"


@service()
class Planner:
    """Changes the number of workers by the load; see `planner` in the settings."""

    dynamo_role: ClassVar[str] = "planner"


@service()
class Worker:
    """Runs the engine of a model."""

    dynamo_role: ClassVar[str] = "worker"
    engine_role: ClassVar[str] = "both"
    generates_text: ClassVar[bool] = True


@service()
class PrefillWorker(Worker):
    """Computes prompts for decode workers."""

    engine_role: ClassVar[str] = "prefill"


@service()
class DecodeWorker(Worker):
    """Computes answers, and prompts where no prefill worker does."""

    engine_role: ClassVar[str] = "decode"


@service()
class EmbeddingWorker(Worker):
    """Computes embeddings, by default of the model `minilm`, beside workers that generate text."""

    generates_text: ClassVar[bool] = False


def _not_running(request: dict[str, Any]) -> Any:
    raise Unsupported(
        f"a request with {', '.join(request)} reached a Processor class that is not running",
        hint="start it by `dynamo serve`, or pass a fake to dynamo.testing.local_graph",
    )
