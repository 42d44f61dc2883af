"""The processor's own process: models for services that call it, without HTTP."""

from __future__ import annotations

import logging

from dynamo.application import Gateway
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.models import Models
from dynamo.services.offered import Offers
from dynamo.services.processing import Processing
from dynamo.services.routing import Routing

log = logging.getLogger(__name__)


class Processor:
    """Follows the models and answers for them over the request plane until the runtime shuts
    down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Set it up."""
        gateway = Gateway()
        Models(runtime, gateway, Routing(runtime)).follow()
        Offers(runtime, gateway).follow()
        await Processing(runtime, gateway).start()
        log.info("processor serves", extra={"fields": {"id": runtime.instance_id}})
