"""Aggregated serving: frontend, processor, and workers for prefill and decode.

dynamo serve graphs.agg:Frontend -f configs/agg.yaml
dynamo serve graphs.agg:AggregatedWorker -f configs/agg.yaml --model-path FOLDER
"""

from dynamo.sdk import service
from dynamo.services import Frontend, Processor, Worker


@service(dynamo={"namespace": "dynamo"}, workers=1)
class AggregatedWorker(Worker):
    """A worker. Its section of the file and `--AggregatedWorker.OPTION=VALUE` set its options."""


Frontend.link(Processor).link(AggregatedWorker)
