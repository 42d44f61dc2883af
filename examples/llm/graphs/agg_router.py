"""Several workers, and a router that chooses among them.

dynamo serve graphs.agg_router:Frontend -f configs/agg_router.yaml
"""

from dynamo.sdk import service
from dynamo.services import Frontend, Processor, Router, Worker


@service(dynamo={"namespace": "dynamo"}, workers=2)
class AggregatedWorker(Worker):
    """Its section of the file and `--AggregatedWorker.OPTION=VALUE` configure its engine."""


Frontend.link(Processor).link(Router).link(AggregatedWorker)
