"""A deployment of simulated workers lives through a day of crashes and partitions, in virtual time:
real processes' code over memory planes, and every answer checked token by token."""

from dynamo.testing.day.day import Day, live_through
from dynamo.testing.day.figures import DayResult

__all__ = ["Day", "DayResult", "live_through"]
