"""The loop of the operator: graphs that something has changed about are reconciled, one after the
other for each graph, until nothing differs from what is desired."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec

from dynamo.communication.kubernetes.link import INVALID, ApiServerError, KubernetesLink
from dynamo.core.clock import Backoff, Clock
from dynamo.core.errors import DynamoError
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.operations.operator.desired import adapter_status, desired
from dynamo.operations.operator.gangs import GatedGraph, is_gated, wants_gangs
from dynamo.operations.operator.kinds import ADAPTER, GRAPH
from dynamo.operations.operator.merge import own_path
from dynamo.operations.operator.names import SCALING, bounded, object_name
from dynamo.operations.operator.pods import PodOptions
from dynamo.operations.operator.rules import check_graph, manifest_path, references
from dynamo.operations.operator.scaling import COST, ScalingHistory, deletion_costs, replica_fields
from dynamo.operations.operator.status import is_ready
from dynamo.operations.operator.upgrade import Problem
from dynamo.operations.operator.view import Desired, Observed
from dynamo.operations.operator.workloads import DEPLOYMENT, WORKLOADS
from dynamo.services.operator.cluster import ClusterView, Object, Owner
from dynamo.services.operator.events import EventRecorder
from dynamo.services.operator.gang_gates import GangGates
from dynamo.services.operator.pod_load import ReadLoad, read_pod_load

log = logging.getLogger(__name__)
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 60.0
RECHECK_MISSING_S = 1.0
"""Missing objects that a manifest refers to are looked for again so often."""
CONCURRENT_GRAPHS = 8
POD_FIELD = re.compile(r'spec\.template\.((?:[^\s:",\[\]]|\[[^\]]*\])+)')
"""The path of a field of a pod template, in a message of an API server."""


class GraphState(msgspec.Struct):
    """The memory of a graph between reconciliations. All of it is found again
    after a restart."""

    backoff: Backoff
    timer: asyncio.TimerHandle | None = None
    has_secret: bool = False
    checked: tuple[str, int] = ("", 0)
    """Uid and generation of the manifest that `missing` and `refused` are of."""
    missing: list[Problem] = []
    refused: list[Problem] = []
    failure: str = ""
    scaling: dict[str, ScalingHistory] = {}
    """By name of adapter."""


class OperatorLoop:
    """Reconciles graphs while this process leads."""

    def __init__(
        self,
        link: KubernetesLink,
        namespace: str,
        clock: Clock,
        options: PodOptions,
        may_write: Callable[[], bool] = lambda: True,
        read_load: ReadLoad = read_pod_load,
    ) -> None:
        self.cluster = ClusterView(link, namespace, self.mark, may_write)
        self._events = EventRecorder(link, clock)
        self._gates = GangGates(self.cluster, clock, self._gated_graphs, self.mark)
        self._clock = clock
        self._options = options
        self._read_load = read_load
        self._rng = Random()
        self._tasks = BackgroundTasks()
        self._states: dict[Owner, GraphState] = {}
        self._dirty: dict[Owner, None] = {}
        self._busy: set[Owner] = set()
        self._leads = False

    async def start(self) -> None:
        """Follow the cluster. Graphs are reconciled from `lead` on."""
        await self.cluster.start(self._tasks)
        self._tasks.start(self._gates.run(), "gangs")

    def lead(self) -> None:
        """Begin to reconcile, with all graphs."""
        self._leads = True
        for owner in self.cluster.owners():
            self.mark(owner)

    def _gated_graphs(self) -> list[GatedGraph]:
        """Return the graphs with pods behind gates, or not bound since these are open."""
        graphs = []
        for owner in self.cluster.owners() if self._leads else ():
            owned = self.cluster.owned(owner)
            pods = [item for (kind, _), item in owned.items() if kind == "Pod"]
            graph = next((item for (kind, _), item in owned.items() if kind == GRAPH), None)
            if graph is None or all(pod["spec"].get("nodeName") for pod in pods):
                continue
            check = check_graph(graph["spec"])
            annotations = graph["metadata"].get("annotations") or {}
            if check.spec is not None and wants_gangs(check.spec, annotations):
                graphs.append(GatedGraph(owner, check.spec, pods))
        return graphs

    def stop_leading(self) -> None:
        """Reconcile nothing more."""
        self._leads = False
        self._dirty.clear()

    async def close(self) -> None:
        """End all tasks."""
        self._leads = False
        for state in self._states.values():
            if state.timer is not None:
                state.timer.cancel()
        await self._tasks.close()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be reconciled now."""
        return not self._dirty and not self._busy

    def mark(self, owner: Owner) -> None:
        """Reconcile a graph soon."""
        if not self._leads:
            return
        self._dirty[owner] = None
        self._start_next()

    def _start_next(self) -> None:
        for owner in list(self._dirty):
            if len(self._busy) >= CONCURRENT_GRAPHS:
                return
            if owner not in self._busy:
                del self._dirty[owner]
                self._busy.add(owner)
                self._tasks.start(self._run(owner), f"reconcile {owner[0]}/{owner[1]}")

    async def _run(self, owner: Owner) -> None:
        """Reconcile a graph once, and again later after a failure."""
        state = self._states.get(owner)
        if state is None:
            state = self._states[owner] = GraphState(Backoff(FIRST_RETRY_S, MAX_RETRY_S, 0.5))
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        delay_s = 0.0
        try:
            await asyncio.sleep(0)  # events of the same moment are of one reconciliation
            delay_s = await self._reconcile(owner, state)
            state.backoff.reset()
            state.failure = ""
        except DynamoError as error:
            delay_s = state.backoff.next_s(self._rng)
            if error.message != state.failure:
                state.failure = error.message
                fields = {"graph": f"{owner[0]}/{owner[1]}", "error": error.message}
                log.warning("a graph could not be reconciled", extra={"fields": fields})
        except Exception:
            delay_s = state.backoff.next_s(self._rng)
            fields = {"graph": f"{owner[0]}/{owner[1]}"}
            log.exception("reconciling a graph failed", extra={"fields": fields})
        finally:
            self._busy.discard(owner)
        if delay_s and self._leads:
            loop = asyncio.get_running_loop()
            state.timer = loop.call_later(delay_s, self.mark, owner)
        self._start_next()

    async def _reconcile(self, owner: Owner, state: GraphState) -> float:
        """Write what differs. Returns after how many seconds to look again, 0: after a change."""
        owned = self.cluster.owned(owner)
        graph = next((item for (kind, _), item in owned.items() if kind == GRAPH), None)
        if graph is None or "deletionTimestamp" in graph["metadata"]:
            del self._states[owner]
            return 0.0
        uid = graph["metadata"]["uid"]
        if state.checked[0] not in ("", uid):
            state.has_secret = False
        observed = await self._observe(graph, owned, state)
        if any(_is_of_another(item, uid) for _, item in observed.objects.items()):
            return RECHECK_MISSING_S  # objects of an older graph of this name go first
        wanted = desired(graph, observed, self._options)
        await self._check_manifest(graph, wanted, observed, state)
        taken = self.cluster.taken(owner, wanted.objects)
        refused = [*state.refused, *taken]
        if observed.missing != state.missing or observed.refused != refused:
            observed.missing, observed.refused = state.missing, refused
            wanted = desired(graph, observed, self._options)
        await self._write(graph, wanted, observed, state)
        if any(map(is_gated, observed.pods)):
            self._gates.wake()
        if state.missing or taken:
            return RECHECK_MISSING_S
        return wanted.recheck_s

    async def _observe(
        self, graph: Object, owned: Mapping[tuple[str, str], Object], state: GraphState
    ) -> Observed:
        metadata = graph["metadata"]
        namespace = metadata["namespace"]
        secret = None
        if not state.has_secret:
            name = object_name(metadata["name"], "planes")
            if await self.cluster.read("Secret", namespace, name) is None:
                secret = secrets.token_hex(32).encode()
            else:
                state.has_secret = True
        return Observed(
            self._clock.wall(),
            {
                (kind, item["metadata"]["name"]): item
                for (kind, _), item in owned.items()
                if kind not in (GRAPH, "Pod")
            },
            [item for (kind, _), item in owned.items() if kind == "Pod"],
            self.cluster.groups,
            state.missing,
            state.refused,
            secret,
            self._scaling_conflicts(owned, state),
            self.cluster.has_gates,
            self._gates.waits.get((namespace, bounded(metadata["name"])), ""),
        )

    def _scaling_conflicts(
        self, owned: Mapping[tuple[str, str], Object], state: GraphState
    ) -> Mapping[str, Sequence[str]]:
        """Return the managers that scale an adapter in turn, by its name."""
        now = self._clock.now()
        for (kind, _), item in owned.items():
            if kind == ADAPTER:
                name = item["metadata"]["name"]
                state.scaling.setdefault(name, ScalingHistory()).note(item, now)
        return {
            name: managers
            for name, history in state.scaling.items()
            if (managers := history.managers_in_turn(now))
        }

    async def _check_manifest(
        self, graph: Object, wanted: Desired, observed: Observed, state: GraphState
    ) -> None:
        """Find what only the API server knows: objects that are missing, pod templates that it
        refuses. The answers of a manifest are kept, except what is missing."""
        metadata = graph["metadata"]
        now = (metadata["uid"], metadata.get("generation", 1))
        if state.checked != now or state.missing:
            namespace = metadata["namespace"]
            state.missing = [
                Problem(reference.path, f"there is no {reference.kind} {reference.name!r}{hint}")
                for reference in references(wanted.check)
                if (hint := await self.cluster.missing_hint(reference, namespace)) is not None
            ]
        if state.checked != now:
            keys = {(item["kind"], item["metadata"]["name"]): item for item in wanted.objects}
            refusals = [
                self._refusals(item, key, wanted)
                for key, item in keys.items()
                if key in wanted.templates and self._is_new(item, observed.objects.get(key))
            ]
            state.refused = [problem for part in await run_all(*refusals) for problem in part]
        state.checked = now

    def _is_new(self, item: Object, live: Object | None) -> bool:
        if live is None:
            return True
        annotations = live["metadata"].get("annotations") or {}
        return any(
            annotations.get(name) != text for name, text in item["metadata"]["annotations"].items()
        )

    async def _refusals(self, item: Object, key: tuple[str, str], wanted: Desired) -> list[Problem]:
        """Return what the API server refuses in a workload, by paths of the manifest."""
        try:
            await self.cluster.dry_run(item)
        except ApiServerError as error:
            if error.status not in (400, INVALID):
                raise
            return pod_problems(error, wanted, *wanted.templates[key])
        return []

    async def _write(
        self, graph: Object, wanted: Desired, observed: Observed, state: GraphState
    ) -> None:
        """Write all that differs, in the order of `Desired`. Workloads come after what they need,
        and those of a new graph at once."""
        cluster, namespace = self.cluster, graph["metadata"]["namespace"]
        status = msgspec.to_builtins(wanted.status)
        if wanted.status_first:
            await cluster.put_status(graph, status)
        for (kind, name), replicas in wanted.scales:
            await self._choose_leaving(observed.objects.get((kind, name)), observed, replicas)
            await cluster.scale(kind, namespace, name, replicas)
            self._events.add(graph, "Scaled", f"{kind} {name} has {replicas} replicas now")
        workloads = [item for item in wanted.objects if item["kind"] in WORKLOADS]
        others = [item for item in wanted.objects if item["kind"] not in WORKLOADS]
        size = 1 if observed.workloads() else max(1, len(workloads))
        for part in (others, *(workloads[at : at + size] for at in range(0, len(workloads), size))):
            await run_all(*(self._apply(graph, item, observed, state) for item in part))
        for (kind, name), item in wanted.deletions.items():
            await cluster.delete(kind, item)
            self._events.add(graph, "Deleted", f"{kind} {name}")
        if wanted.replicas:
            await cluster.apply_fields(replica_fields(graph, wanted.replicas), SCALING)
            text = ", ".join(f"{name} {count}" for name, count in wanted.replicas.items())
            self._events.add(graph, "ScalingAdapterWins", f"replicas of adapters: {text}")
        for item in list(cluster.owned((namespace, bounded(graph["metadata"]["name"]))).values()):
            if item["kind"] == ADAPTER:
                await cluster.put_status(item, adapter_status(item, observed))
        await cluster.put_status(graph, status)
        self._events.add_status(graph, wanted.status)
        self._events.flush(self._tasks)

    async def _apply(
        self, graph: Object, item: Object, observed: Observed, state: GraphState
    ) -> None:
        """Write an object if it is not as desired."""
        kind, name = item["kind"], item["metadata"]["name"]
        if kind == "Secret":
            await self.cluster.create(kind, item)
            state.has_secret = True
            return
        live = observed.objects.get((kind, name))
        if kind == DEPLOYMENT:
            await self._choose_leaving(live, observed, item["spec"]["replicas"])
        if await self.cluster.apply(item, live):
            self._events.add(graph, "Applied", f"{kind} {name}")

    async def _choose_leaving(self, live: Object | None, observed: Observed, replicas: int) -> None:
        """Let the pods of a Deployment with the least load leave first, if some are to leave."""
        leaving = live["spec"]["replicas"] - replicas if live else 0
        if live is None or leaving <= 0 or not replicas:
            return
        labels = live["spec"]["selector"]["matchLabels"].items()
        pods = [
            pod
            for pod in observed.pods
            if labels <= (pod["metadata"].get("labels") or {}).items() and is_ready(pod)
        ]
        loads = await run_all(*map(self._read_load, pods))
        known = {
            pod["metadata"]["name"]: load
            for pod, load in zip(pods, loads, strict=True)
            if load is not None
        }
        namespace = live["metadata"]["namespace"]
        for name, cost in deletion_costs(pods, known, leaving).items():
            await self.cluster.annotate("Pod", namespace, name, {COST: cost})


def pod_problems(
    error: ApiServerError, wanted: Desired, number: int, template: Object
) -> list[Problem]:
    """Return what the API server refuses in the pod template of a component, by paths of the
    manifest."""
    assert wanted.check.spec is not None  # noqa: S101 - there are templates of valid specs alone
    component = wanted.check.spec.components[number]
    problems = []
    for cause in error.details.get("causes") or [{"message": error.message.split(": ", 1)[-1]}]:
        match = POD_FIELD.search(cause.get("field") or cause["message"])
        field = match and re.sub("^(labels|annotations)$", r"metadata.\1", match[1])
        own = field and own_path(field, template, component.pod_template)
        path = f"spec.components[{number}].podTemplate{'.' + own if own else ''}"
        text = cause.get("message", "")
        problems.append(Problem(manifest_path(path, wanted.check.paths), text))
    return problems


def _is_of_another(item: Object, uid: str) -> bool:
    """Whether an object belongs to a graph that was there before under this name."""
    owners = item["metadata"].get("ownerReferences") or ()
    return any(owner["kind"] == GRAPH and owner["uid"] != uid for owner in owners)
