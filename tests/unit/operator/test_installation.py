"""The operator's installation: by kustomize and by its chart, with the same rights."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from tests.support.helm import find_helm

from dynamo.operations.operator.manifests import read_manifests

DEPLOY = Path(__file__).parents[3] / "deploy"
CHART = DEPLOY / "helm" / "dynamo"
KUBECTL = Path(sysconfig.get_path("scripts")) / "kubectl"


def run(*command: object) -> list[dict[str, Any]]:
    """Return the objects that a program prints."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True
    )
    return read_manifests(done.stdout, "output")


def check(objects: list[dict[str, Any]]) -> None:
    """Assert that all objects are valid, and that pods keep to the restricted profile."""
    kinds = [item["kind"] for item in objects]
    assert kinds.count("CustomResourceDefinition") == 3
    for item in objects:
        for version in ("1.30", "1.37"):
            kubernetes_validate.validate(item, version, strict=True)
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            security = pod["containers"][0]["securityContext"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security["allowPrivilegeEscalation"]


@pytest.mark.skipif(not KUBECTL.exists(), reason="needs kubectl")
def test_kustomize_makes_valid_objects() -> None:
    check(run(KUBECTL, "kustomize", DEPLOY / "kubernetes"))


def test_the_chart_makes_valid_objects_with_the_same_rights() -> None:
    helm = find_helm()
    if helm is None:
        pytest.skip("helm is not to be had")
    plain = run(helm, "template", "x", CHART)
    check(plain)
    (role,) = (item for item in plain if item["kind"] == "ClusterRole")
    shipped = read_manifests((DEPLOY / "kubernetes" / "operator.yaml").read_text(), "operator")
    (wanted,) = (item for item in shipped if item["kind"] == "ClusterRole")
    assert role["rules"] == wanted["rules"]
    limited = run(helm, "template", "x", CHART, "--set", "watchNamespace=lab,keepCrds=false")
    check(limited)
    roles = {item["kind"]: item for item in limited if item["kind"] in ("Role", "ClusterRole")}
    assert roles["Role"]["metadata"]["namespace"] == "lab"
    changes = {verb for rule in roles["ClusterRole"]["rules"] for verb in rule["verbs"]}
    assert changes == {"get", "list"}
    both = [*roles["Role"]["rules"], *roles["ClusterRole"]["rules"]]
    assert all(rule in both for rule in wanted["rules"])


def test_values_of_the_chart_have_a_schema() -> None:
    import yaml

    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    for wrong in ({"replica": 1}, {"replicas": "2"}, {"watchNamespace": "Lab"}, {"image": ""}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**values, **wrong}, schema)
