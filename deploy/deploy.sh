#!/usr/bin/env bash
# Run the whole stack on this host, with Docker or (--local) as plain processes, or (--kubernetes) a
# graph in a cluster.
set -euo pipefail

HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
ROOT=$(dirname -- "$HERE")
SECRETS=$HERE/secrets.env
FRONTEND_PORT=${FRONTEND_PORT:-8000}
FRONTEND_2_PORT=${FRONTEND_2_PORT:-8010}
ROUTER_PORT=${ROUTER_PORT:-8001}
ETCD_PORT=${ETCD_PORT:-2379}
ETCD_PEER_PORT=${ETCD_PEER_PORT:-2380}
NATS_PORT=${NATS_PORT:-4222}
NATS_MONITOR_PORT=${NATS_MONITOR_PORT:-8222}
PROMETHEUS_PORT=${PROMETHEUS_PORT:-9090}
GRAFANA_PORT=${GRAFANA_PORT:-3000}
WORKERS=${WORKERS:-2}
START_TIMEOUT=${START_TIMEOUT:-900}
DEPLOY_GRAPH=${DEPLOY_GRAPH:-agg_router}
DEPLOY_CONFIG=${DEPLOY_CONFIG:-distributed.yaml}
FRAMEWORK=${FRAMEWORK:-native}
export FRONTEND_PORT FRONTEND_2_PORT ROUTER_PORT ETCD_PORT ETCD_PEER_PORT NATS_PORT \
  NATS_MONITOR_PORT PROMETHEUS_PORT GRAFANA_PORT WORKERS DEPLOY_GRAPH DEPLOY_CONFIG FRAMEWORK

usage() {
  cat <<EOF
usage: deploy.sh [--local | --kubernetes] [--infra | --disagg] COMMAND

  build            build the images dynamo:latest-\$FRAMEWORK and dynamo:latest (--local: check that all programs are installed)
  start            start all services in order, wait until they serve, print the addresses
  stop             stop all services and keep their data
  restart          stop, then start
  status           print the state of each service (exit code 1 if one is unhealthy)
  logs [SERVICE]   follow the logs (--no-follow prints them)
  cleanup          stop all services and remove the data of this deployment

  --local          run etcd, nats-server, router, workers and two frontends as processes of this
                   host, without Docker; their state is in \$DEPLOY_STATE
  --kubernetes     install the operator and the graph of \$GRAPH (examples/kubernetes/mock.yaml) into the
                   cluster of kubectl's context; SERVICE is a component
  --infra          only etcd and NATS
  --disagg         with prefill and decode workers, the groups of configs/disagg.yaml

Environment: FRONTEND_PORT ($FRONTEND_PORT), FRONTEND_2_PORT ($FRONTEND_2_PORT), ROUTER_PORT ($ROUTER_PORT), ETCD_PORT ($ETCD_PORT),
ETCD_PEER_PORT ($ETCD_PEER_PORT), NATS_PORT ($NATS_PORT), NATS_MONITOR_PORT ($NATS_MONITOR_PORT), PROMETHEUS_PORT ($PROMETHEUS_PORT),
GRAFANA_PORT ($GRAFANA_PORT), WORKERS ($WORKERS; without --disagg), START_TIMEOUT ($START_TIMEOUT s), FRAMEWORK ($FRAMEWORK, vllm, sglang,
tensorrt_llm: the workers' image; all but native use the GPUs of this host), MODELS (folder mounted at /models), BIND (127.0.0.1),
and every setting as DYNAMO_SECTION__KEY (with Docker only those that docker-compose.yml names).
EOF
}

use_disagg() { PROFILE=disagg DEPLOY_GRAPH=disagg_router DEPLOY_CONFIG=disagg.yaml; }

say() { printf '%s\n' "$*"; }

# MESSAGE HINT...
fail() {
  printf 'deploy.sh: %s\n' "$1" >&2
  shift
  for hint in "$@"; do printf '  %s\n' "$hint" >&2; done
  exit 1
}

misused() {
  printf 'deploy.sh: %s\n' "$1" >&2
  usage >&2
  exit 2
}

answers() { curl -fs -o /dev/null --max-time 5 "$1"; }

tell_endpoints() {
  if [[ $PROFILE == infra ]]; then
    say "etcd          http://127.0.0.1:$ETCD_PORT"
    say "NATS          nats://127.0.0.1:$NATS_PORT, http://127.0.0.1:$NATS_MONITOR_PORT"
    return
  fi
  cat <<EOF
API           http://127.0.0.1:$FRONTEND_PORT
              http://127.0.0.1:$FRONTEND_2_PORT
Router        http://127.0.0.1:$ROUTER_PORT
etcd          http://127.0.0.1:$ETCD_PORT
NATS          nats://127.0.0.1:$NATS_PORT, http://127.0.0.1:$NATS_MONITOR_PORT
EOF
}

# With Docker

docker_need() {
  local instead="or run without Docker: $0 --local start"
  command -v docker >/dev/null ||
    fail "Docker is not installed" "install it: https://docs.docker.com/engine/install" "$instead"
  docker compose version >/dev/null 2>&1 ||
    fail "Docker's compose plugin is missing" \
      "install docker-compose-plugin (Docker's packages) or docker-compose-v2 (Ubuntu's)" "$instead"
  docker info >/dev/null 2>&1 ||
    fail "Docker's daemon does not answer" "start it: sudo systemctl start docker" \
      "or join its group: sudo usermod -aG docker $(id -un), then log in again" "$instead"
}

docker_compose() {
  local words=(--file "$HERE/docker-compose.yml" --env-file "$HERE/.env")
  [[ ! -f $SECRETS ]] || words+=(--env-file "$SECRETS")
  [[ $FRAMEWORK == native ]] || words+=(--file "$HERE/docker-compose.gpu.yml")
  docker compose "${words[@]}" --profile "$PROFILE" "$@"
}

random_word() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

docker_make_secrets() {
  [[ ! -f $SECRETS ]] || return 0
  (
    umask 077
    printf 'GRAFANA_PASSWORD=%s\nDYNAMO_SECRET=%s\nDYNAMO_PLANE_HOST=0.0.0.0\n' \
      "$(random_word)" "$(random_word)" >"$SECRETS"
  )
}

docker_build() {
  "$ROOT/container/build.sh" --framework native
  [[ $FRAMEWORK == native ]] || "$ROOT/container/build.sh" --framework "$FRAMEWORK"
}

docker_start() {
  docker_make_secrets
  docker_compose up --detach --wait --wait-timeout "$START_TIMEOUT" ||
    fail "not all services are healthy after $START_TIMEOUT s" "see $0 status and $0 logs SERVICE"
  tell_endpoints
  [[ $PROFILE != infra ]] || return 0
  say "Prometheus    http://127.0.0.1:$PROMETHEUS_PORT"
  say "Grafana       http://127.0.0.1:$GRAFANA_PORT (admin; the password is in $SECRETS)"
}

docker_stop() { docker_compose --profile stack --profile disagg down; }

docker_status() {
  docker_compose ps --all
  [[ $PROFILE != infra ]] || return 0
  answers "http://127.0.0.1:$FRONTEND_PORT/health" ||
    fail "http://127.0.0.1:$FRONTEND_PORT/health reports no healthy state" "see $0 logs dynamo-frontend"
  say "the API is healthy"
}

docker_logs() {
  local words=()
  [[ ! $FOLLOW ]] || words+=(--follow)
  docker_compose logs "${words[@]}" "$@"
}

docker_cleanup() {
  docker_compose --profile stack --profile disagg down --volumes --remove-orphans
  rm -f "$SECRETS"
}

main() {
  local way=docker command="" rest=()
  PROFILE=stack FOLLOW=yes
  for word in "$@"; do
    case $word in
      -h | --help) usage && exit 0 ;;
      --local | --kubernetes)
        [[ $way == docker || $way == "${word#--}" ]] || misused "give --local or --kubernetes"
        way=${word#--}
        ;;
      --infra | --disagg)
        [[ $PROFILE == stack ]] || misused "--infra has no workers: give --infra or --disagg"
        PROFILE=${word#--}
        ;;
      --no-follow) FOLLOW="" ;;
      -*) misused "unknown option $word" ;;
      *) if [[ $command ]]; then rest+=("$word"); else command=$word; fi ;;
    esac
  done
  [[ $command ]] || misused "a command is missing"
  [[ $command == logs || ${#rest[@]} -eq 0 ]] || misused "$command takes no argument ${rest[0]}"
  case $command in
    build | start | stop | restart | status | logs | cleanup) ;;
    *) misused "unknown command $command" ;;
  esac
  [[ $PROFILE != disagg ]] || use_disagg
  # shellcheck source-path=SCRIPTDIR source=local.sh
  [[ $way == docker ]] || source "$HERE/$way.sh"
  command -v curl >/dev/null || fail "curl is not installed" "install it: apt-get install curl"
  "${way}_need"
  if [[ $command == restart ]]; then
    "${way}_stop"
    "${way}_start"
  else
    "${way}_$command" "${rest[@]}"
  fi
}

main "$@"
