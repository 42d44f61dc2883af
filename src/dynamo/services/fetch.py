"""A model's files from any of its workers, by content hash: no shared file system."""

from __future__ import annotations

import secrets

from dynamo.core.context import Context
from dynamo.core.errors import ModelUnavailable, NotFound, WorkerFailed
from dynamo.models.files import FileRef, find_file, store_file
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime


async def ensure_file(runtime: DistributedRuntime, files: Client, ref: FileRef) -> FileRef:
    """The file on this host: the publisher's path, the user's cache, or fetched into that through
    the `files` endpoint. Raises `ModelUnavailable`."""
    offload = runtime.clock.offload
    if await offload(find_file, ref) is not None:
        return ref
    for instance in list(files.instances.values()):
        parts: list[bytes] = []

        def take(part: bytes, parts: list[bytes] = parts) -> bool:
            parts.append(part)
            return True

        context = Context(request_id=secrets.token_hex(8))
        try:
            await files.call(instance, ref.sha256.encode(), context, take)
        except (NotFound, WorkerFailed):
            continue
        await offload(store_file, ref, b"".join(parts))
        return ref
    raise ModelUnavailable(f"no worker offers {ref.name}", hint="it is tried again")
