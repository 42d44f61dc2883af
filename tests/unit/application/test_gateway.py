"""Models by name: order, aliases that move, removal, and which one is the default."""

from __future__ import annotations

import pytest

from dynamo.application.gateway import Gateway, ServedEmbeddingModel, ServedModel, UnloadedModel
from dynamo.core.errors import InvalidRequest, ModelNotFound, ModelNotReady


def served(*names: str, context_tokens: int = 100, parent: str = "") -> ServedModel:
    return ServedModel(names, object(), 1, context_tokens, parent=parent)


def test_models_are_in_the_order_of_the_settings_and_the_first_is_the_default() -> None:
    gateway = Gateway()
    gateway.set_desired({"a": (), "b": ()})
    gateway.set_pending("a", "its supervisor starts a worker")
    gateway.add(served("b"))
    with pytest.raises(ModelNotReady, match="'default' is not ready: its supervisor starts"):
        gateway.find("default")
    with pytest.raises(ModelNotReady):
        gateway.find(None)
    assert gateway.find("b")[0] == "b"

    gateway.add(served("a"))
    assert list(gateway.models) == ["a", "b"]
    assert gateway.find(None)[0] == "a"


def test_an_alias_moves_away_from_the_model_that_was_announced_with_it() -> None:
    gateway = Gateway()
    gateway.add(served("old", "chat"))
    gateway.add(served("new"))
    gateway.set_desired({"old": ("chat",), "new": ()})
    assert gateway.find("chat")[1].names[0] == "old"
    gateway.set_desired({"old": (), "new": ("chat",)})
    assert gateway.find("chat")[1].names[0] == "new"


def test_an_alias_never_hides_a_model() -> None:
    gateway = Gateway()
    gateway.add(served("a"))
    gateway.add(served("b", "a"))
    assert gateway.find("a")[1].names[0] == "a"


def test_an_alias_of_a_model_without_workers_is_not_ready() -> None:
    gateway = Gateway()
    gateway.add(served("a"))
    gateway.set_desired({"a": (), "b": ("chat",)})
    gateway.set_pending("b", "no worker")
    with pytest.raises(ModelNotReady, match="'chat' is not ready: no worker"):
        gateway.find("chat")


def test_a_removed_model_takes_its_aliases_adapters_and_context_with_it() -> None:
    gateway = Gateway()
    gateway.add(served("a", context_tokens=10))
    gateway.add(served("b", "chat", context_tokens=99))
    gateway.set_adapters("b", {"sql": served("sql", context_tokens=99, parent="b")})
    assert (list(gateway.models), gateway.context_tokens) == (["a", "b", "chat", "sql"], 99)
    gateway.remove("b")
    assert (list(gateway.models), gateway.context_tokens) == (["a"], 10)
    for name in ("b", "chat", "sql"):
        with pytest.raises(ModelNotFound, match="served: 'a'"):
            gateway.find(name)


def test_an_embedding_model_is_no_default_for_text() -> None:
    gateway = Gateway()
    gateway.set_desired({"vectors": (), "a": ()})
    gateway.add_embedding_model(ServedEmbeddingModel(("vectors",), object(), 1, 10, 2))
    gateway.add(served("a"))
    assert gateway.find(None)[0] == "a"
    gateway.remove("vectors")
    assert not gateway.embedding_models


def on_demand(**models: bool) -> Gateway:
    """Return a gateway with models that are not loaded, and whether each computes vectors."""
    gateway = Gateway()
    gateway.set_desired({name: (f"{name}-alias",) for name in models})
    for name in models:
        gateway.set_pending(name, "")
    gateway.set_unloaded(models)
    return gateway


def test_models_on_demand_are_found_by_all_their_names() -> None:
    gateway = on_demand(a=False, b=False)
    assert gateway.not_ready_reason == ""
    for name, model in (("a", "a"), ("b-alias", "b"), (None, "a"), ("default", "a")):
        with pytest.raises(UnloadedModel) as got:
            gateway.find(name)
        assert got.value.model == model
    with pytest.raises(ModelNotFound, match="served: 'a', 'a-alias', 'b', 'b-alias'"):
        gateway.find("c")
    gateway.add(served("a"))
    gateway.set_unloaded({"b": False})
    assert gateway.find(None)[0] == "a"
    assert dict(gateway.unloaded_names()) == {"b": "b", "b-alias": "b"}


def test_a_model_on_demand_is_not_loaded_for_a_request_that_it_cannot_answer() -> None:
    gateway = on_demand(vectors=True, a=False)
    for name in ("vectors", "vectors-alias"):
        with pytest.raises(InvalidRequest, match="computes embeddings and no text"):
            gateway.find(name)
    for name in ("a", "a-alias"):
        with pytest.raises(InvalidRequest, match="generates text and computes no embeddings"):
            gateway.find_embedding_model(name)
    for name in (None, "default", "vectors", "vectors-alias"):
        with pytest.raises(UnloadedModel) as got:
            gateway.find_embedding_model(name)
        assert got.value.model == "vectors"
    with pytest.raises(UnloadedModel) as got:
        gateway.find(None)
    assert got.value.model == "a"
    with pytest.raises(InvalidRequest, match="only embedding models are served here: 'vectors'"):
        on_demand(vectors=True).find(None)


def test_the_default_model_is_found_as_soon_as_it_is_open() -> None:
    gateway = on_demand(a=False, vectors=True)
    gateway.add(served("a"))  # `set_unloaded` follows
    for name in (None, "default", "a"):
        assert gateway.find(name)[1].names == ("a",)
    with pytest.raises(InvalidRequest) as got:
        gateway.find_embedding_model("a")
    assert got.value.hint == "embedding models: 'vectors'"


def test_an_adapter_of_a_model_without_workers_is_not_ready() -> None:
    gateway = Gateway()
    gateway.add(served("a"))
    gateway.set_desired({"a": (), "b": ("chat",)}, {"sql": "b"})
    gateway.set_pending("b", "its supervisor starts a worker")
    with pytest.raises(ModelNotReady, match="'sql' is not ready: its supervisor starts"):
        gateway.find("sql")
    assert [name for name in ("a", "b", "chat", "sql", "x") if gateway.is_model_name(name)] == [
        "a",
        "b",
        "chat",
    ]
    gateway.set_desired({"a": ()})
    with pytest.raises(ModelNotFound):
        gateway.find("sql")


def test_an_alias_of_an_embedding_model_without_workers_is_not_ready() -> None:
    gateway = Gateway()
    gateway.add(served("a"))
    gateway.set_desired({"a": (), "minilm": ("vectors",)})
    gateway.set_pending("minilm", "its supervisor starts a worker")
    with pytest.raises(ModelNotReady, match="'vectors' is not ready: its supervisor starts"):
        gateway.find_embedding_model("vectors")


def test_an_unknown_name_is_answered_with_the_nearest_of_all() -> None:
    gateway = Gateway()
    gateway.add(served("small"))
    gateway.set_desired({"small": (), "minilm": ("vectors",)}, {"poet": "small"})
    for name, near in {"smal": "small", "vector": "vectors", "poets": "poet"}.items():
        for find in (gateway.find, gateway.find_embedding_model):
            gateway.add_embedding_model(ServedEmbeddingModel(("v",), object(), 1, 10, 2))
            with pytest.raises(ModelNotFound) as caught:
                find(name)
            assert caught.value.hint == f"did you mean {near!r}?"
