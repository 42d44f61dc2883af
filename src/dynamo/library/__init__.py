"""Parts of a deployment for programs that use them alone: KV blocks, engines, routing, transfers.

Programs import these by the names of the packages below, such as `dynamo.inference.memory` and
`dynamo.scheduling.router`. No process of a deployment uses this folder.
"""
