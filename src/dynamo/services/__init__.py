"""Ready-made components, wired: what the command line starts."""

from dynamo.services.launch import deployment_specs, run_child, serve

__all__ = ["deployment_specs", "run_child", "serve"]
