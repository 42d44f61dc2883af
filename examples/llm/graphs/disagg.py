"""Disaggregated serving: prefill workers compute the prompts of decode workers.

dynamo serve graphs.disagg:Frontend -f configs/disagg.yaml
dynamo serve graphs.disagg:PrefillWorker -f configs/disagg.yaml --only
"""

from dynamo.sdk import service
from dynamo.services import DecodeWorker as ReadyDecodeWorker
from dynamo.services import Frontend, Processor, Router
from dynamo.services import PrefillWorker as ReadyPrefillWorker


@service(dynamo={"namespace": "dynamo"}, workers=1)
class PrefillWorker(ReadyPrefillWorker):
    """A worker that computes prompts. `--PrefillWorker.OPTION=VALUE` sets its options."""


@service(dynamo={"namespace": "dynamo"}, workers=1)
class DecodeWorker(ReadyDecodeWorker):
    """A worker that computes answers. `--DecodeWorker.OPTION=VALUE` sets its options."""


Frontend.link(Processor).link(Router).link(DecodeWorker).link(PrefillWorker)
