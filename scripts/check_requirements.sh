#!/usr/bin/env bash
# Check whether this host can run Dynamo, before anything is installed. `dynamo doctor` checks more.
set -euo pipefail

usage() {
  cat <<EOF
usage: scripts/check_requirements.sh [--gpu] [--docker]

  --gpu      an NVIDIA GPU is needed (vLLM, SGLang, TensorRT-LLM); otherwise only reported
  --docker   Docker is needed; otherwise only reported

Environment: PYTHON (the interpreter to check), PORTS ("8000 8001"), DYNAMO_ETCD_ENDPOINTS and
DYNAMO_NATS_URL (servers that must be reachable). Exit code 1 if a requirement is not met.
EOF
}

MIN_MEMORY_MB=2048 MIN_DISK_MB=1024 MIN_OPEN_FILES=4096 MIN_DRIVER=525 # the first of CUDA 12
FAILED=0

# VERDICT NAME TEXT [HINT]
report() {
  printf '%-5s %-12s %s\n' "$1" "$2" "$3"
  [[ $1 == ok || -z ${4:-} ]] || printf '%-18s -> %s\n' "" "$4"
  [[ $1 != fail ]] || FAILED=1
}

# NEEDED NAME TEXT HINT: a failure if needed, else a remark.
report_missing() {
  if [[ $1 == yes ]]; then report fail "$2" "$3" "$4"; else report ok "$2" "$3 (not needed)"; fi
}

# NAME VALUE MINIMUM UNIT HINT
report_amount() {
  if [[ $2 == unlimited || $2 -ge $3 ]]; then report ok "$1" "$2 $4"; else
    report warn "$1" "$2 $4, $3 recommended" "$5"
  fi
}

check_system() {
  local libc
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null || echo "no glibc")
  case "$(uname -s) $libc" in
    "Linux glibc"*) report ok system "Linux $(uname -r), $libc, $(uname -m)" ;;
    *) report fail system "$(uname -s), $libc" "use Linux with glibc 2.28 or newer" ;;
  esac
}

check_python() {
  local name version
  for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    version=$("$name" -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null) || continue
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
    if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
      report ok python "$version ($name)"
    else
      report fail python "$version ($name) without venv" "install it: apt-get install $name-venv"
    fi
    return
  done
  report fail python "no Python 3.11 or newer" "install one, or name it: PYTHON=PATH $0"
}

check_host() {
  report_amount cores "$(nproc)" 2 "usable cores" "frontend and worker will share one core"
  report_amount memory "$(awk '/^MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)" \
    "$MIN_MEMORY_MB" "MB available" "the default model needs 1 GB"
  report_amount disk "$(df --output=avail -BM . | tail -n 1 | tr -dc 0-9)" "$MIN_DISK_MB" "MB free" "free some"
  report_amount "open files" "$(ulimit -Hn)" "$MIN_OPEN_FILES" "at most (hard limit)" "ulimit -Hn $MIN_OPEN_FILES"
}

# NEEDED
check_gpu() {
  local line driver count=0
  if ! line=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null); then
    report_missing "$1" gpu "no NVIDIA GPU answers" "install the driver; native, mock and llama.cpp need no GPU"
    return
  fi
  while IFS=, read -r name memory driver; do
    count=$((count + 1))
    report ok "gpu $count" "$name,$memory, driver$driver"
  done <<<"$line"
  driver=${driver// /}
  [[ ${driver%%.*} -ge $MIN_DRIVER ]] ||
    report fail gpu "driver $driver is too old" "install $MIN_DRIVER or newer, which CUDA 12 needs"
}

# NEEDED
check_docker() {
  local instead="install it, or run without it: make run"
  if ! command -v docker >/dev/null; then
    report_missing "$1" docker "Docker is not installed" "$instead"
  elif ! docker compose version >/dev/null 2>&1; then
    report_missing "$1" docker "Docker without its compose plugin" "install docker-compose-plugin"
  elif ! docker info >/dev/null 2>&1; then
    report_missing "$1" docker "Docker's daemon does not answer" "sudo systemctl start docker"
  else
    report ok docker "$(docker --version)"
  fi
}

# HOST PORT
# shellcheck disable=SC2016 # the inner shell expands its arguments
connects() { timeout 3 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null; }

check_ports() {
  for port in ${PORTS:-8000 8001}; do
    if connects 127.0.0.1 "$port"; then
      report warn "port $port" "in use" "stop its owner, or choose another: dynamo run --http-port PORT"
    else
      report ok "port $port" "free"
    fi
  done
}

# NAME DEFAULT_PORT URL...
check_servers() {
  local name=$1 default=$2 url authority host port
  shift 2
  for url in "$@"; do
    authority=${url#*://} authority=${authority##*@} authority=${authority%%/*}
    host=${authority%:*} port=${authority##*:}
    [[ $authority == *:* ]] || port=$default
    host=${host#[} host=${host%]}
    if connects "$host" "$port"; then
      report ok "$name" "$host:$port answers"
    else
      report fail "$name" "$host:$port cannot be reached" "start it: deploy/deploy.sh --local --infra start"
    fi
  done
}

main() {
  local gpu=no docker=no
  for word in "$@"; do
    case $word in
      -h | --help) usage && exit 0 ;;
      --gpu) gpu=yes ;;
      --docker) docker=yes ;;
      *) usage >&2 && exit 2 ;;
    esac
  done
  check_system
  check_python
  check_host
  check_gpu "$gpu"
  check_docker "$docker"
  check_ports
  local etcd nats
  IFS=', ' read -ra etcd <<<"${DYNAMO_ETCD_ENDPOINTS:-}"
  IFS=', ' read -ra nats <<<"${DYNAMO_NATS_URL:-}"
  check_servers etcd 2379 "${etcd[@]}"
  check_servers nats 4222 "${nats[@]}"
  exit "$FAILED"
}

main "$@"
