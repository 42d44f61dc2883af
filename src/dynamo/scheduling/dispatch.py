"""The last stage: one request, as bytes, to the instance that was chosen."""

from __future__ import annotations

from dynamo.core.codec import ReplyDecoder, encode_request
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, NotFound, WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance


class Dispatch:
    """Calls an instance of one endpoint and reads its answer into the Reply."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def send(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """Returns when the answer is complete or the Reply had enough. Raises what the instance
        raised; `InstanceGone` where it did nothing; `WorkerFailed` for an answer without an end."""
        reader = ReplyDecoder(reply)
        try:
            await self._client.call(instance, encode_request(request), context, reader.feed)
        except NotFound as error:
            gone = InstanceGone(f"instance {instance.id}: {error.message}")
            gone.instance = instance.id
            raise gone from error
        except WorkerFailed as error:
            if not reader.complete:  # else only the end of the stream was lost
                error.instance = instance.id
                raise
        if not reader.complete:
            cut = WorkerFailed(f"instance {instance.id} ended its stream before its answer")
            cut.instance = instance.id
            raise cut
