#!/bin/sh
# Install packages into a virtual environment, which is made if it is missing. Called by make.
#
#   scripts/install.sh FOLDER PYTHON [ARGUMENTS of pip install]
#
# A failure while the file FOLDER/.installing exists removes the environment: it was never complete.
set -eu
folder=$1 python=$2
shift 2
unfinished=$folder/.installing log=$folder/.installing.log

fail() {
	printf 'make: %s\n' "$*" >&2
	exit 1
}

clean() {
	rm -f "$log"
	test ! -e "$unfinished" || rm -rf "$folder"
}

trap 'test $? = 0 || clean' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if test -e "$unfinished" && test $# = 0; then
	rm -rf "$folder" # of an installation that was killed
fi
if test ! -x "$folder/bin/python"; then
	test -n "$python" || fail 'Python 3.11 or newer is needed: install one, or name it: make run PYTHON=PATH'
	echo "make: creating $folder"
	mkdir -p "$folder"
	touch "$unfinished"
	"$python" -m venv "$folder" 2>"$log" || {
		cat "$log" >&2
		exit 1
	}
elif ! "$folder/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	version=$("$folder/bin/python" --version 2>&1) || version='an interpreter that does not run'
	fail "$folder has $version, and Python 3.11 or newer is needed: run rm -r $folder, then make again"
fi
test $# -gt 0 || exit 0

# A network that refuses connections is told within a second. One that swallows them takes 45 s.
if PIP_RETRIES=${PIP_RETRIES:-2} "$folder/bin/python" -m pip install --quiet \
	--disable-pip-version-check "$@" 2>"$log"; then
	cat "$log" >&2
	rm "$log"
elif grep -q 'Retrying (' "$log" && reason=$(grep '^ERROR: .*\(No matching\|Max retries\|onnect\|timed out\)' "$log"); then
	reason=$(printf '%s\n' "$reason" | sed -n '$s/^ERROR: //p')
	fail "the package index does not answer ($reason): check the network and \`pip config list\`, then run make again"
else
	cat "$log" >&2
	exit 1
fi
