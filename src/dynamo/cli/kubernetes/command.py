"""`dynamo kubernetes`: the words that follow, and what needs no cluster."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from dynamo.operations.operator.rules import GraphCheck

ACTIONS = {
    "crds": "print the CustomResourceDefinitions",
    "convert": "print graphs of v1alpha1 as v1beta1",
    "status": "show the graphs of the cluster, and why one does not serve",
    "operator": "run the operator, until SIGTERM",
    "manifests": "print the objects that the operator makes of graphs",
    "place": "show where the pods of graphs would go, and why not elsewhere",
}
FLAGS = {
    "file": ("convert", "manifests", "place"),
    "nodes": ("place",),
    "groups": ("manifests",),
    "namespace": ("operator", "status"),
    "image": ("operator",),
    "levels": ("place",),
}
"""The actions of each flag."""
EXAMPLES = """\
  dynamo kubernetes crds | kubectl apply --server-side -f -
  dynamo kubernetes convert -f graph.yaml
  dynamo kubernetes manifests -f graph.yaml
  kubectl get nodes,pods -A -o yaml | dynamo kubernetes place -f graph.yaml --nodes -"""


def parser() -> Parser:
    """Return the parser: an action and its files."""
    lines = "\n".join(f"{name}: {text}." for name, text in ACTIONS.items())
    parser = Parser("dynamo kubernetes", lines, EXAMPLES, usage=f"{{{','.join(ACTIONS)}}} [FLAGS]")
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=" | ".join(ACTIONS))
    parser.add_argument(
        "-f", "--file", metavar="FILE", help="convert, manifests, place: graphs; -: standard input"
    )
    parser.add_argument(
        "--nodes", metavar="FILE", help="place: nodes, and pods that use them; -: standard input"
    )
    parser.add_argument(
        "--groups",
        metavar="GROUPS",
        help="manifests: API groups of the cluster beside its own, by comma; default: both that "
        "replicas of several nodes need",
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="operator, status: graphs of this namespace alone; default: of all",
    )
    parser.add_argument(
        "--image",
        metavar="IMAGE",
        help="operator: image of pods whose manifest names none; default: dynamo:latest-vllm",
    )
    parser.add_argument(
        "--levels", metavar="LABELS", help="place: labels of the levels, broad to narrow, by comma"
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run an action."""
    args = parser().parse(arguments)
    for flag, users in FLAGS.items():
        if getattr(args, flag) is not None and args.action not in users:
            raise ConfigError(
                f"{args.action} has no flag --{flag}", hint=f"it is one of {', '.join(users)}"
            )
    actions: Mapping[str, Callable[[argparse.Namespace], int]] = {
        "crds": _print_crds,
        "convert": _convert,
        "status": _print_status,
        "operator": _run_operator,
        "manifests": _print_objects,
        "place": _place,
    }
    return actions[args.action](args)


def read_objects(path: str | None, flag: str) -> list[dict[str, Any]]:
    """Return the objects of a file that a flag names. Raises `ConfigError`."""
    from dynamo.operations.operator.manifests import read_manifests

    if not path:
        raise ConfigError(f"{flag} is missing", hint=f"{flag} FILE, or {flag} - for standard input")
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from None
    return read_manifests(text, "standard input" if path == "-" else path)


def _print_crds(_: argparse.Namespace) -> int:
    from dynamo.operations.operator.crds import custom_resources
    from dynamo.operations.operator.manifests import write_manifests

    print(write_manifests(custom_resources()), end="")
    return 0


def find_graphs(objects: Sequence[dict[str, Any]], path: str) -> Sequence[dict[str, Any]]:
    """Return the graphs among the objects of a file. Raises `ConfigError` if there is none."""
    from dynamo.operations.operator.kinds import GRAPH, GROUP

    graphs = [
        item
        for item in objects
        if item["kind"] == GRAPH and item["apiVersion"].startswith(f"{GROUP}/")
    ]
    if not graphs:
        kinds = ", ".join(sorted({item["kind"] for item in objects})) or "nothing"
        raise ConfigError(f"no {GRAPH} in {path}, but {kinds}", hint="name a file with a graph")
    return graphs


def _convert(args: argparse.Namespace) -> int:
    """Print the objects, with graphs as v1beta1. Problems and notes go to standard error."""
    from dynamo.operations.operator.kinds import BETA, GROUP
    from dynamo.operations.operator.manifests import write_manifests
    from dynamo.operations.operator.rules import check_graph
    from dynamo.operations.operator.upgrade import upgrade

    objects = read_objects(args.file, "-f")
    code = 0
    for item in find_graphs(objects, args.file):
        spec = item.get("spec") or {}
        code = max(code, _print_findings(item["metadata"].get("name", ""), check_graph(spec)))
        item["apiVersion"] = f"{GROUP}/{BETA}"
        if "services" in spec:
            item["spec"] = upgrade(spec).spec
    print(write_manifests(objects), end="")
    return code


def _print_objects(args: argparse.Namespace) -> int:
    """Print what the operator makes of graphs. Problems and notes go to standard error."""
    from dynamo.operations.operator.desired import desired
    from dynamo.operations.operator.manifests import write_manifests
    from dynamo.operations.operator.view import Observed
    from dynamo.operations.operator.workloads import GROVE, LEADER_WORKER

    objects = read_objects(args.file, "-f")
    known = {GROVE, LEADER_WORKER}
    groups = frozenset(args.groups.split(",")) if args.groups is not None else frozenset(known)
    if unknown := sorted(groups - known - {""}):
        hint = nearest_name_hint(unknown[0], sorted(known))
        raise ConfigError(f"--groups: {unknown[0]!r} changes no object", hint=hint)
    code = 0
    result: list[Mapping[str, Any]] = []
    for graph in find_graphs(objects, args.file):
        observed = Observed(0.0, groups=groups, secret=secrets.token_hex(32).encode())
        wanted = desired(graph, observed)
        code = max(code, _print_findings(graph["metadata"].get("name", ""), wanted.check))
        result += wanted.objects
    print(write_manifests(result), end="")
    return code


def _print_status(args: argparse.Namespace) -> int:
    from dynamo.cli.kubernetes.status import print_status

    return print_status(args.namespace or "")


def _run_operator(args: argparse.Namespace) -> int:
    from dynamo.operations.operator.pods import PodOptions
    from dynamo.services.operator.process import run_operator

    options = PodOptions(image=args.image) if args.image else PodOptions()
    return run_operator(args.namespace or "", options)


def _print_findings(name: str, check: GraphCheck) -> int:
    """Print the notes and problems of a graph. Returns 1 if there is a problem."""
    for note in check.notes:
        print(f"note: {name}: {note}", file=sys.stderr)
    for problem in check.problems:
        print(f"error: {name}: {problem}", file=sys.stderr)
    return 1 if check.problems else 0


def _place(args: argparse.Namespace) -> int:
    """Place the gangs of all graphs in turn. Returns 1 if one has no place."""
    from dynamo.operations.operator.gangs import gangs_of_graph
    from dynamo.operations.operator.rules import check_graph
    from dynamo.operations.placement.explain import describe_place, explain_refusal
    from dynamo.operations.placement.fit import place
    from dynamo.operations.placement.nodes import read_nodes
    from dynamo.operations.placement.topology import DEFAULT_LEVELS, Topology

    graphs = find_graphs(read_objects(args.file, "-f"), args.file)
    nodes = read_nodes(read_objects(args.nodes, "--nodes"))
    if not nodes:
        raise ConfigError(
            f"no node in {args.nodes} takes pods", hint="`kubectl get nodes,pods -A -o yaml`"
        )
    levels = tuple(args.levels.split(",")) if args.levels else DEFAULT_LEVELS
    topology = Topology(nodes, levels)
    code = 0
    for graph in graphs:
        name = graph["metadata"].get("name", "graph")
        check = check_graph(graph.get("spec") or {})
        if check.spec is None or check.problems:
            raise ConfigError(f"{name}: {check.problems[0]}")
        for gang in gangs_of_graph(name, check.spec, topology.levels):
            placed = place(topology, gang)
            lines = describe_place(placed) if placed else explain_refusal(topology, gang)
            print("\n".join(lines))
            if placed is None:
                code = 1
                if not gang.after:  # further replicas wait until the first ones stand
                    break
    return code
