#!/usr/bin/env bash
# Build the image of one engine: dynamo:latest-FRAMEWORK.
set -euo pipefail

HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
ROOT=$(dirname -- "$HERE")

usage() {
  cat <<EOF
usage: container/build.sh [--framework NAME] [--tag TAG] [--base IMAGE] [--dry-run]

  --framework NAME   vllm, sglang, tensorrt_llm, or native (default), which needs no GPU
  --tag TAG          name of the image (default: dynamo:latest-NAME; native also gets dynamo:latest)
  --base IMAGE       image of the engine to build on, such as another version of it
  --dry-run          print the command
EOF
}

# MESSAGE
misused() {
  printf 'build.sh: %s\n' "$1" >&2
  usage >&2
  exit 2
}

main() {
  local framework=native tags=() base="" run=()
  while [[ $# -gt 0 ]]; do
    case $1 in
      -h | --help) usage && exit 0 ;;
      --dry-run) run=(echo) && shift && continue ;;
      --framework | --tag | --base) [[ $# -ge 2 ]] || misused "$1 has no value" ;;
      *) misused "unknown option $1" ;;
    esac
    case $1 in
      --framework) framework=${2,,} ;;
      --tag) tags+=("$2") ;;
      --base) base=$2 ;;
    esac
    shift 2
  done
  local file=$HERE/Dockerfile.$framework
  case $framework in
    native) file=$ROOT/deploy/Dockerfile ;;
    trtllm | tensorrt-llm) framework=tensorrt_llm file=$HERE/Dockerfile.tensorrt_llm ;;
    vllm | sglang | tensorrt_llm) ;;
    *) misused "unknown framework $framework" ;;
  esac
  if [[ ${#tags[@]} -eq 0 ]]; then
    tags=("dynamo:latest-$framework")
    [[ $framework != native ]] || tags+=(dynamo:latest)
  fi
  local words=(--file "$file")
  for tag in "${tags[@]}"; do words+=(--tag "$tag"); done
  [[ ! $base ]] || words+=(--build-arg "BASE=$base")
  if [[ ${#run[@]} -eq 0 ]] && ! command -v docker >/dev/null; then
    printf 'build.sh: Docker is not installed\n  install it, or run without images: make run\n' >&2
    exit 1
  fi
  "${run[@]}" docker build "${words[@]}" "$ROOT"
}

main "$@"
