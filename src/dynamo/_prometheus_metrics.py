"""The names of `dynamo.prometheus_metrics`, as some versions of NVIDIA Dynamo name the module."""

from dynamo.prometheus_metrics import *  # noqa: F403
