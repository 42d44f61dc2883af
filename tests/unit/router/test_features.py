"""Selection of workers by the features of their engines."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec.structs import replace

from dynamo.core.errors import Unsupported
from dynamo.core.features import required_features
from dynamo.core.values import Feature, StructuredOutput
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.features import PARAMETERS, FeatureFilter
from dynamo_conformance.engines import make_request


def test_each_feature_names_the_field_that_needs_it() -> None:
    assert PARAMETERS.keys() == set(get_args(Feature))


def make_instance(name: str, *features: str, **adapters: str) -> Instance:
    engine = {"features": list(features), "adapters": adapters}
    return Instance(name, "tcp:1", "n", "worker", "generate", {"engine": engine})


def test_a_pattern_for_white_space_needs_an_engine_that_obeys_it() -> None:
    form = StructuredOutput("json_object", whitespace_pattern=" ?")
    required = required_features(replace(make_request(), structured=form))
    instances = {
        "a": make_instance("a", "structured", "whitespace"),
        "b": make_instance("b", "structured"),
    }
    assert FeatureFilter().workers_without(instances, required) == {"b"}
    del instances["a"]
    with pytest.raises(Unsupported, match="no worker of this model supports: whitespace") as caught:
        FeatureFilter().workers_without(instances, required)
    assert caught.value.param == "structured_outputs.whitespace_pattern"


def test_only_workers_with_an_adapter_can_answer_for_it() -> None:
    instances = {
        "a": make_instance("a", "adapters", sql="/x"),
        "b": make_instance("b", "adapters"),
        "c": make_instance("c"),
    }
    assert FeatureFilter().workers_without(instances, ("adapters", "sql")) == {"b", "c"}
    del instances["a"]
    with pytest.raises(Unsupported, match="supports: sql") as caught:
        FeatureFilter().workers_without(instances, ("adapters", "sql"))
    assert caught.value.param == "model"
