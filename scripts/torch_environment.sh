#!/bin/sh
# Make an environment with PyTorch and Triton beside the packages of another environment.
#
#   scripts/torch_environment.sh FOLDER OTHER_FOLDER TORCH
set -eu
folder=$1 other=$2 torch=$3

"$other/bin/python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet "$torch"
# PyTorch's build for CPUs lacks Triton, and not every machine has one.
"$folder/bin/python" -c 'import triton' 2>/dev/null ||
	"$folder/bin/python" -m pip install --quiet --no-deps triton==3.9.0 ||
	echo "make: no Triton for this machine, so that tests of kernels are skipped"
paths() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
printf '%s\nimport site; site.addsitedir("%s")\n' "$(paths "$other")" "$(paths "$other")" >"$(paths "$folder")/other.pth"
