"""The models that supervisors list, as a frontend reads them."""

from __future__ import annotations

from dynamo.runtime.supervisors import KindRecord, SupervisorRecord, SupervisorView
from dynamo.services.desired_models import DesiredModels, ModelState


class Records(SupervisorView):
    """Records of supervisors that a test sets."""

    def __init__(self) -> None:
        self.records: dict[str, SupervisorRecord] = {}
        self._listeners = []

    def set(self, supervisor: str, *models: str, namespace: str = "ns") -> None:
        listed = dict.fromkeys(models, ())
        self.records[supervisor] = SupervisorRecord(models=listed, namespace=namespace)
        self.notify()

    def notify(self) -> None:
        for listener in self._listeners:
            listener()


def test_a_model_is_removed_when_no_supervisor_lists_it_any_more() -> None:
    records = Records()
    desired = DesiredModels(records, "ns")
    records.set("one", "a", "b")
    records.set("two", "a")
    records.set("one", "b")
    assert (list(desired.aliases), desired.removed) == (["b", "a"], set())
    records.set("two")
    assert (list(desired.aliases), desired.removed) == (["b"], {"a"})
    records.set("two", "a")
    assert desired.removed == set()


def test_a_model_of_a_supervisor_that_is_gone_is_not_removed() -> None:
    records = Records()
    desired = DesiredModels(records, "ns")
    records.set("one", "a")
    records.records.clear()
    records.notify()
    assert (list(desired.aliases), desired.removed) == (["a"], set())


def test_a_removal_during_a_restart_of_the_watch_is_noticed() -> None:
    records = Records()
    desired = DesiredModels(records, "ns")
    records.set("one", "a", "b")
    records.records.clear()
    records.notify()
    records.set("one", "b")
    assert desired.removed == {"a"}


def test_supervisors_of_other_namespaces_remove_nothing() -> None:
    records = Records()
    desired = DesiredModels(records, "ns")
    records.set("one", "a")
    records.set("other", "x", namespace="other")
    records.set("other", namespace="other")
    assert (list(desired.aliases), desired.removed) == (["a"], set())


def test_the_state_is_that_of_the_models_kinds() -> None:
    records = Records()
    desired = DesiredModels(records, "ns")
    kinds = {"a-worker": KindRecord(model="a"), "b-worker": KindRecord(model="b")}
    record = SupervisorRecord(
        {"b-worker": 1}, failing={"a-worker": "no weights"}, kinds=kinds, namespace="ns"
    )
    records.records["one"] = record
    records.notify()

    assert desired.state("a") == ModelState("failed", "no weights")
    assert desired.state("b").state == "loading"
    assert desired.state("c").state == "unloaded"


def test_adapters_have_the_model_that_a_supervisor_lists_them_with() -> None:
    records = Records()
    desired = DesiredModels(records, "ns")
    adapters = {"a": {"sql": "/sql", "code": ""}, "gone": {"x": "/x"}}
    records.records["one"] = SupervisorRecord(models={"a": ()}, namespace="ns", adapters=adapters)
    records.notify()
    assert desired.adapters == {"sql": "a"}
    records.records.clear()  # the supervisor may come back
    records.notify()
    assert desired.adapters == {"sql": "a"}
    records.set("one", "b")
    assert desired.adapters == {}


def test_models_of_the_own_supervisor_come_first_whoever_writes_last() -> None:
    records = Records()
    records.set("1-other", "x", "b")
    records.set("2-own", "b", "a")
    desired = DesiredModels(records, "ns", "2-own")
    records.notify()
    assert list(desired.aliases) == ["b", "a", "x"]
    records.set("2-own", "b", "a", "c")
    assert list(desired.aliases) == ["b", "a", "c", "x"]
    records.set("1-other", "y")
    assert list(desired.aliases) == ["b", "a", "c", "y"]
