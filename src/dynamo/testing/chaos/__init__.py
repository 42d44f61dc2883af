"""A deployment of simulated workers lives through a day of crashes and partitions, in virtual time:
real processes' code over memory planes, and every answer checked token by token."""

from dynamo.testing.chaos.simulation import ChaosResult, ChaosScenario, run_chaos

__all__ = ["ChaosResult", "ChaosScenario", "run_chaos"]
