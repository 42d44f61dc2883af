"""A supervisor that runs in a test, and the commands that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import CONTROL_SOCKET, Deployment
from dynamo.runtime.processes.control import ControlRequest, send_control_request
from dynamo.runtime.processes.supervisor import Supervisor


@asynccontextmanager
async def serving(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    """Run a supervisor until its processes serve and it accepts requests; stop it at the end."""
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        while not (supervisor._deployment.folder / CONTROL_SOCKET).exists():
            await asyncio.sleep(0.01)
        yield supervisor
        supervisor.stop()
        assert await running == 0


async def control(
    deployment: Deployment, do: Any, name: str = "", *more: Any, **fields: Any
) -> list[str]:
    """Send a `ControlRequest` of these fields, and return the lines of the answer."""
    request = ControlRequest(do, name, *more, **fields)
    return await asyncio.to_thread(
        lambda: list(send_control_request(request, deployment.folder, 20.0))
    )
