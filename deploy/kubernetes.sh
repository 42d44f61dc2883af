# shellcheck shell=bash
# Run a graph in the Kubernetes cluster of kubectl's context. deploy.sh sources this file and defines
# fail, misused and say.

: "${HERE:?run deploy.sh}" "${ROOT:?}" "${command:?}"
GRAPH=${GRAPH:-$ROOT/examples/kubernetes/mock.yaml}
OPERATOR=$HERE/kubernetes
LABEL=nvidia.com/dynamo

kubernetes_need() {
  PATH=$PATH:$ROOT/.venv/bin
  [[ $PROFILE == stack ]] || misused "--$PROFILE has no meaning with --kubernetes: the graph says what runs"
  command -v kubectl >/dev/null ||
    fail "kubectl is not installed" "install it: https://kubernetes.io/docs/tasks/tools" "or run without a cluster: $0 --local start"
  [[ -f $GRAPH ]] || fail "there is no file $GRAPH" "GRAPH names the manifest of a DynamoGraphDeployment"
  [[ $command == build ]] || kubectl get --raw /version >/dev/null ||
    fail "no cluster answers" "see kubectl config get-contexts, or start one for tests: python -m dynamo.testing.kubernetes"
}

kubernetes_build() {
  docker_need
  docker_build
  say "push the images to a registry of the cluster, and name them in $GRAPH and $OPERATOR/operator.yaml"
}

# ARGUMENT...: kubectl on the graph of the manifest.
on_graph() { kubectl "$1" --filename "$GRAPH" "${@:2}"; }

graph_name() { on_graph get --output 'jsonpath={.metadata.name}{.items[*].metadata.name}'; }

kubernetes_start() {
  kubectl apply --server-side --kustomize "$OPERATOR"
  on_graph apply
  on_graph wait --for=condition=Ready --timeout="${START_TIMEOUT}s" ||
    fail "the graph is not ready after $START_TIMEOUT s" "see $0 --kubernetes status"
  say "API: kubectl port-forward service/$(graph_name)-frontend $FRONTEND_PORT:8000"
}

kubernetes_stop() { on_graph delete --ignore-not-found --cascade=foreground --timeout="${START_TIMEOUT}s"; }

kubernetes_status() {
  local name
  name=$(graph_name 2>/dev/null) || fail "the graph of $GRAPH is not in the cluster" "start it: $0 --kubernetes start"
  kubectl get dgd,dgdsa,pods --selector "$LABEL-graph-deployment-name=$name"
  on_graph wait --for=condition=Ready --timeout=1s >/dev/null 2>&1 ||
    fail "the graph $name is not ready" \
      "$(on_graph get --output 'jsonpath={.status.conditions[?(@.status=="False")].message}')" "see kubectl describe dgd $name"
  say "the graph $name is ready"
}

kubernetes_logs() {
  local name words=()
  name=$(graph_name 2>/dev/null) || fail "the graph of $GRAPH is not in the cluster"
  [[ ! $FOLLOW ]] || words+=(--follow)
  kubectl logs --prefix --tail=-1 "${words[@]}" \
    --selector "$LABEL-graph-deployment-name=$name${1:+,$LABEL-component=$1}"
}

# The kinds go with the operator, and with them all graphs of the cluster.
kubernetes_cleanup() {
  local kind others=""
  kind=$(kubectl get crd dynamographdeployments.nvidia.com --ignore-not-found --output name)
  if [[ $kind ]]; then
    kubernetes_stop
    others=$(kubectl get dgd --all-namespaces --ignore-not-found --output name)
  fi
  if [[ $others ]]; then
    say "the operator stays: other graphs need it"
  else
    kubectl delete --ignore-not-found --kustomize "$OPERATOR"
  fi
}
