"""Rights: tokens of service accounts, roles and their bindings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dynamo.testing.kubernetes.controllers.workloads import is_ready
from dynamo.testing.kubernetes.failures import ApiFailure
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.objects import ClusterObjects, Target
from dynamo.testing.kubernetes.selectors import structured_selector

RBAC = "rbac.authorization.k8s.io"


class User(NamedTuple):
    """The user of a request."""

    name: str
    groups: tuple[str, ...] = ()


class Attributes(NamedTuple):
    """The action of a request. `resource` has the subresource behind a slash."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str


ADMINISTRATOR = User("admin", ("system:masters",))


class Access:
    """Finds the user of a request, and whether roles allow it."""

    def __init__(self, objects: ClusterObjects) -> None:
        self._objects = objects
        self.tokens: dict[str, User] = {"admintoken": ADMINISTRATOR}
        self.anonymous: User | None = ADMINISTRATOR
        """The user of requests without a token. None: they are refused."""
        self.refused: list[str] = []
        """Messages of the answers 403."""

    def account_token(self, namespace: str, account: str) -> str:
        """Return a token of a service account."""
        token = f"{namespace}.{account}.{len(self.tokens)}"
        name = f"system:serviceaccount:{namespace}:{account}"
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
        self.tokens[token] = User(name, (*groups, "system:authenticated"))
        return token

    def user_of(self, authorization: str) -> User:
        """Return the user of a token. Raises `ApiFailure` 401."""
        user = self.tokens.get(authorization.removeprefix("Bearer "))
        if not authorization:
            user = self.anonymous
        if user is None:
            raise ApiFailure(401, "Unauthorized")
        return user

    def check(self, user: User, attributes: Attributes) -> None:
        """Raise `ApiFailure` 403 for what no role allows."""
        if "system:masters" in user.groups:
            return
        if any(_allows(rule, attributes) for rule in self._rules(user, attributes.namespace)):
            return
        verb, group, resource, namespace, name = attributes
        shown = f"{resource}.{group}" if group else resource
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        named = f'"{name}" ' if name else ""
        text = (
            f'{shown} {named}is forbidden: User "{user.name}" cannot {verb} resource "{resource}" '
            f'in API group "{group}" {where}'
        )
        self.refused.append(text)
        raise ApiFailure(403, text, about=(group, resource, name))

    def act(self, target: Target, body: Object, user: str) -> Object:
        """Do what a subresource other than status and scale does."""
        del user
        if target.kind.id == "pods" and target.subresource == "eviction":
            return self._evict(target._replace(subresource=""), body)
        if target.kind.id == "serviceaccounts" and target.subresource == "token":
            return {**body, "status": {"token": self.account_token(*target.key)}}
        raise ApiFailure(404, f"the server could not find {target.subresource!r}: {body.keys()}")

    def _evict(self, target: Target, body: Object) -> Object:
        """Delete a pod, as far as its disruption budgets let it."""
        pod, store = self._objects.read(target), self._objects.store
        for budget in store.items("poddisruptionbudgets.policy", target.key[0]):
            selects = structured_selector(budget["spec"].get("selector") or {})
            pods = [p for p in store.items("pods", target.key[0])
                    if selects(p["metadata"].get("labels") or {})]  # fmt: skip
            away = sum(not is_ready(p) or "deletionTimestamp" in p["metadata"] for p in pods)
            least = budget["spec"].get("minAvailable")
            most = budget["spec"].get("maxUnavailable", 1) if least is None else len(pods) - least
            if pod["metadata"]["name"] in [p["metadata"]["name"] for p in pods] and away >= most:
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise ApiFailure(429, text, retry_after_s=10)
        self._objects.delete(target, body.get("deleteOptions") or {})
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _rules(self, user: User, namespace: str) -> Iterator[Object]:
        store = self._objects.store
        for binding in store.items(f"clusterrolebindings.{RBAC}"):
            if _binds(binding, user):
                yield from self._role_rules("", binding["roleRef"])
        for binding in store.items(f"rolebindings.{RBAC}", namespace) if namespace else ():
            if _binds(binding, user):
                yield from self._role_rules(namespace, binding["roleRef"])

    def _role_rules(self, namespace: str, reference: Object) -> Iterable[Object]:
        plural = "roles" if reference["kind"] == "Role" else "clusterroles"
        key = (namespace if plural == "roles" else "", reference["name"])
        return (self._objects.store.get(f"{plural}.{RBAC}", key) or {}).get("rules") or ()


def _binds(binding: Object, user: User) -> bool:
    for subject in binding.get("subjects") or ():
        name = subject["name"]
        if subject["kind"] == "ServiceAccount":
            namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
            name = f"system:serviceaccount:{namespace}:{name}"
        if name == user.name or (subject["kind"] == "Group" and name in user.groups):
            return True
    return False


def _allows(rule: Object, attributes: Attributes) -> bool:
    names = rule.get("resourceNames")
    return (
        bool({"*", attributes.verb} & set(rule.get("verbs") or ()))
        and bool({"*", attributes.group} & set(rule.get("apiGroups") or ()))
        and bool({"*", attributes.resource} & set(rule.get("resources") or ()))
        and (not names or attributes.name in names)
    )
