"""The last stage of the pipeline: call the chosen instance."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo.core.codec import ReplyDecoder, encode_choice, encode_request, share_group
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, NotFound, WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance


class Dispatch:
    """Calls instances of one endpoint and decodes their answers into the Reply."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def send(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """Return when the answer is complete or the Reply wants no more.

        Raises what the instance raised, `InstanceGone` when the instance does not serve the
        endpoint, and `WorkerFailed` for an incomplete answer.
        """
        decoder = ReplyDecoder(reply)
        group = request.group
        try:
            if group is None:
                await self._client.call(instance, encode_request(request), context, decoder.feed)
            elif group.covers(request):
                payload, shared = encode_choice(request), share_group(group)
                await self._client.call(instance, payload, context, decoder.feed, shared=shared)
            else:
                payload = encode_request(replace(request, group=None))
                await self._client.call(instance, payload, context, decoder.feed)
        except NotFound as error:
            gone = InstanceGone(f"instance {instance.id}: {error.message}")
            gone.instance = instance.id
            raise gone from error
        except WorkerFailed as error:
            if not decoder.complete:  # after a complete answer only the stream's end was lost
                if not error.instance:
                    error.instance, error.rank = instance.id, request.rank
                raise
        if not decoder.complete:
            incomplete = WorkerFailed(f"instance {instance.id} ended its stream before its answer")
            incomplete.instance = instance.id
            raise incomplete
