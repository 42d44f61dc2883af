#!/bin/sh
# Run a command with a home, a temporary and a runtime folder of its own, which are removed after it.
#
#   scripts/isolated.sh COMMAND ARGUMENTS...
#
# What an earlier run left cannot hide a fault. pip keeps its configuration and its cache, and models
# that were downloaded before are not downloaded again.
set -eu
home=${HOME:-/nonexistent} cache=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}
root=$(mktemp -d "${TMPDIR:-/tmp}/d-XXXX") # short: paths of Unix sockets have 107 characters

clean() {
	chmod -R u+rwx "$root" # tests make folders that nobody can read
	rm -rf "$root" || rm -rf "$root" # a process that just ends may write once more
}

trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

(umask 077 && mkdir -p "$root/home/.config" "$root/home/.cache/dynamo/models" "$root/t" "$root/run")
for configuration in .config/pip .pip; do
	test ! -d "$home/$configuration" || ln -s "$home/$configuration" "$root/home/$configuration"
done
for model in "$cache"/dynamo/models/*; do
	test ! -e "$model" || ln -s "$model" "$root/home/.cache/dynamo/models/"
done
unset XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME
export HOME="$root/home" TMPDIR="$root/t" XDG_RUNTIME_DIR="$root/run"
export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$cache/pip}"
"$@"
