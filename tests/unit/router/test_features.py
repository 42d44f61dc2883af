"""Selection of workers by the features of their engines."""

from __future__ import annotations

from typing import get_args

from dynamo.core.values import Feature
from dynamo.scheduling.router.features import PARAMETERS


def test_each_feature_names_the_field_that_needs_it() -> None:
    assert PARAMETERS.keys() == set(get_args(Feature))
