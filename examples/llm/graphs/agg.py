"""Workers that compute prompts and answers: frontend, processor, workers.

dynamo serve graphs.agg:Frontend -f configs/agg.yaml
dynamo serve graphs.agg:AggregatedWorker -f configs/agg.yaml --model-path FOLDER
"""

from dynamo.sdk import service
from dynamo.services import Frontend, Processor, Worker


@service(dynamo={"namespace": "dynamo"}, workers=1)
class AggregatedWorker(Worker):
    """Its section of the file and `--AggregatedWorker.OPTION=VALUE` configure its engine."""


Frontend.link(Processor).link(AggregatedWorker)
