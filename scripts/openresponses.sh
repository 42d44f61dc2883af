#!/bin/sh
# Run the official Open Responses compliance tests against a server:
#   scripts/openresponses.sh FOLDER [URL] [MODEL]
# FOLDER is a copy of https://github.com/openresponses/openresponses. Needs node and npm. Prints the
# result of each case. The WebSocket cases and those of /v1/responses/compact fail: neither exists.
set -eu
folder=$1
url=${2:-http://127.0.0.1:8000/v1}
model=${3:-default}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$folder/bin" "$folder/src" "$folder/package.json" "$work"
chmod -R u+w "$work"
cd "$work"
npm install --silent --no-audit --no-fund zod@3.25.76 tsx >&2
npx tsx bin/compliance-test.ts --base-url "$url" --api-key "${API_KEY:-any}" --model "$model" --json
