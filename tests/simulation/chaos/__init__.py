"""Runs a deployment of simulated workers through crashes and partitions in virtual time.

The code is that of real processes, over memory planes. Every answer is checked token by token.
"""

from tests.simulation.chaos.simulation import ChaosResult, ChaosScenario, run_chaos

__all__ = ["ChaosResult", "ChaosScenario", "run_chaos"]
