"""A frontend process of a simulation that answers HTTP without sockets, with its stories."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace
from tests.simulation.chaos.processes import MODEL_NAME, SimulatedFrontend, SimulatedNetwork
from tests.simulation.chaos.requests import GREEDY, SimulatedPrompts

from dynamo.application import Application, Gateway, ServedModel
from dynamo.application.generation.stories import Stories
from dynamo.communication.http import HttpLimits
from dynamo.communication.http.connection import HttpServerState
from dynamo.core.context import Context
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.text import ChatRequest, TextFinish, TextReply
from dynamo.core.values import Finish, GenerateRequest, Started, StopConditions
from dynamo.services.observing.publisher import StoryPublisher
from dynamo.telemetry.story import Story


class TokenReply(Reply):
    """Writes a word for each token."""

    def __init__(self, reply: TextReply) -> None:
        self._reply = reply

    def begin(self, started: Started) -> None:
        self._reply.begin(0, started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del logprobs
        return all(self._reply.text(0, "word ") for _ in ids)

    def finish(self, end: Finish) -> None:
        self._reply.finish(0, TextFinish(end.reason, end.completion_tokens))


class RandomPrompts:
    """A processor (`ServedModel.processor`) that sends random prompts to the workers."""

    def __init__(self, frontend: SimulatedFrontend, prompts: SimulatedPrompts) -> None:
        self._frontend, self._prompts = frontend, prompts

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        prompt = self._prompts.make()
        reply.prompt(len(prompt))
        stops = StopConditions(max_tokens=request.options.max_tokens, ignore_eos=True)
        generation = GenerateRequest(
            context.request_id, MODEL_NAME, prompt.tobytes(), GREEDY, stops
        )
        await self._frontend.pipeline.send(generation, context, TokenReply(reply))


class SimulatedServer:
    """A frontend process with its HTTP application."""

    def __init__(
        self, network: SimulatedNetwork, number: int, prompt_tokens: int, deadline_s: float
    ) -> None:
        self.frontend = SimulatedFrontend(network, f"frontend-{number}")
        self._number, self._prompt_tokens, self._deadline_s = number, prompt_tokens, deadline_s
        self.stories: dict[str, Story] = {}

    async def start(self) -> None:
        """Start the frontend."""
        await self.frontend.start(self._number)
        runtime = self.frontend.runtime
        settings = replace(
            runtime.settings.server,
            max_concurrent_requests=64,
            max_waiting_requests=8,
            request_timeout=self._deadline_s,
        )
        gateway = Gateway()
        application = Application(settings, gateway, runtime.clock, runtime.metrics)
        self._publisher = StoryPublisher(runtime, lambda: None)
        await self._publisher.start()
        listeners = [self._publisher.add, self._keep]
        self._stories = Stories(listeners, runtime.clock)
        application.generation.stories = self._stories
        prompts = SimulatedPrompts(self._prompt_tokens, Random(self._number))
        processor = RandomPrompts(self.frontend, prompts)
        gateway.add(ServedModel((MODEL_NAME,), processor, 0, 16_384))
        self._application = application
        self.http = HttpServerState(
            application.handle,
            HttpLimits.from_settings(settings),
            runtime.clock,
            application.on_error,
            application.check_headers,
        )

    def _keep(self, stories: Sequence[Story]) -> None:
        self.stories.update((story.client_id, story) for story in stories)

    def take_story(self, client_id: str) -> Story:
        """Return the story of a request that has ended."""
        self._stories.flush()
        return self.stories.pop(client_id)

    async def stop(self) -> None:
        """Stop regularly, after the last request."""
        await self.http.tasks.join()
        self.frontend.events.network.rejoin()
        self._stories.flush()
        await self._publisher.close()
        self._application.generation.deadlines.close()
        await self.frontend.shutdown()
