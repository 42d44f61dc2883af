"""Several workers, and a router of its own that chooses among them by what their caches hold.

dynamo serve graphs.agg_router:Frontend -f configs/agg_router.yaml
dynamo serve graphs.agg_router:Router -f configs/agg_router.yaml --only
"""

from dynamo.sdk import service
from dynamo.services import Frontend, Processor, Worker
from dynamo.services import Router as ReadyRouter


@service(dynamo={"namespace": "dynamo"}, workers=1)
class Router(ReadyRouter):
    """In a process of its own; HTTP on port 8001: health, metrics, why a worker was chosen."""


@service(dynamo={"namespace": "dynamo"}, workers=2)
class AggregatedWorker(Worker):
    """Its section of the file and `--AggregatedWorker.OPTION=VALUE` configure its engine."""


Frontend.link(Processor).link(Router).link(AggregatedWorker)
