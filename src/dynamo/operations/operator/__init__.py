"""The operator of Kubernetes: its kinds, and what becomes of a graph. Nothing here opens a
connection; `dynamo.services.operator` runs it."""
