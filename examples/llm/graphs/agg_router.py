"""Aggregated serving with a router process that chooses workers by their caches.

dynamo serve graphs.agg_router:Frontend -f configs/agg_router.yaml
dynamo serve graphs.agg_router:Router -f configs/agg_router.yaml --only
"""

from dynamo.sdk import service
from dynamo.services import Frontend, Processor, Worker
from dynamo.services import Router as ReadyRouter


@service(dynamo={"namespace": "dynamo"}, workers=1)
class Router(ReadyRouter):
    """A router process. HTTP on port 8001 has health, metrics and explained decisions."""


@service(dynamo={"namespace": "dynamo"}, workers=2)
class AggregatedWorker(Worker):
    """A worker. Its section of the file and `--AggregatedWorker.OPTION=VALUE` set its options."""


Frontend.link(Processor).link(Router).link(AggregatedWorker)
