"""Disaggregated serving with a router process that chooses both workers by their caches.

dynamo serve graphs.disagg_router:Frontend -f configs/disagg_router.yaml
dynamo serve graphs.disagg_router:Router -f configs/disagg_router.yaml --only
"""

from dynamo.sdk import service
from dynamo.services import DecodeWorker as ReadyDecodeWorker
from dynamo.services import Frontend, Processor
from dynamo.services import PrefillWorker as ReadyPrefillWorker
from dynamo.services import Router as ReadyRouter


@service(dynamo={"namespace": "dynamo"}, workers=1)
class Router(ReadyRouter):
    """A router process. HTTP on port 8001 has health, metrics and explained decisions."""


@service(dynamo={"namespace": "dynamo"}, workers=1)
class PrefillWorker(ReadyPrefillWorker):
    """A worker that computes prompts. `--PrefillWorker.OPTION=VALUE` sets its options."""


@service(dynamo={"namespace": "dynamo"}, workers=1)
class DecodeWorker(ReadyDecodeWorker):
    """A worker that computes answers. `--DecodeWorker.OPTION=VALUE` sets its options."""


Frontend.link(Processor).link(Router).link(DecodeWorker).link(PrefillWorker)
