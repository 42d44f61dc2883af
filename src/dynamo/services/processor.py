"""The processor's own process: models for services that call it, without HTTP."""

from __future__ import annotations

import logging

from dynamo.application import Gateway
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.models import ModelWatcher
from dynamo.services.offered import ServiceModelWatcher
from dynamo.services.processing import ProcessorEndpoints
from dynamo.services.routing import ProcessRouting

log = logging.getLogger(__name__)


class ProcessorService:
    """Follows the models and answers for them over the request plane until the runtime shuts
    down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Set it up."""
        gateway = Gateway()
        ModelWatcher(runtime, gateway, ProcessRouting(runtime)).start()
        ServiceModelWatcher(runtime, gateway).start()
        await ProcessorEndpoints(runtime, gateway).start()
        log.info("processor serves", extra={"fields": {"id": runtime.instance_id}})
