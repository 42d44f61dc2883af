# `make run` serves a model; `make test` checks and tests everything. Needs Python 3.11 or newer.

# The first that is new enough (a name may be a shim that has nothing behind it).
PYTHON ?= $(shell for one in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$one -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$one && break; done)
PORT   ?= 8000
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
PIP    := scripts/install.sh $(VENV) "$(PYTHON)"

# An interpreter that the caller names is tested at once, also where $(VENV) has another.
ifneq ($(origin PYTHON),file)
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
NAMED := $(shell $(PYTHON) -c 'import sys; print(".".join(map(str, sys.version_info[:3])), sys.version_info >= (3, 11))' 2>/dev/null)
ifneq ($(lastword $(NAMED)),True)
$(error PYTHON=$(PYTHON) $(if $(NAMED),is Python $(firstword $(NAMED)),does not run), and Python 3.11 or newer is needed)
endif
endif
endif

# Bytecode of the sources is stored though the environment forbids it: processes start in a third of the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test test-engines test-torch test-clients check format bench faults fuzz oracle lock docs clean

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

# Two stamps: what serves a model, and what checks and tests need besides. Packages are pinned with
# hashes (make lock). run.txt is complete and omits huggingface_hub, hence --no-deps.
$(VENV)/.installed: pyproject.toml src/dynamo/__init__.py requirements/build.txt requirements/run.txt
	@$(PIP)
	@echo "make: installing the packages of requirements/run.txt into $(VENV), 140 MB, once"
	@$(PIP) --require-hashes --no-deps -r requirements/build.txt -r requirements/run.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installing
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements/test.txt requirements/nixl.txt
	@echo "make: installing what checks and tests need into $(VENV), 960 MB with the rest, once"
	@$(PIP) --require-hashes --no-build-isolation -r requirements/test.txt
	@$(PIP) --require-hashes --no-deps -r requirements/nixl.txt
	@touch $@

setup: $(VENV)/.installed-test  ## make .venv with everything for checks and tests

run: $(VENV)/.installed  ## serve the default model; PORT=8000, ARGS="MODEL --workers 2"
	@exec $(BIN)/dynamo run --http-port $(PORT) $(ARGS)

test: check  ## checks, then the whole test suite
	scripts/isolated.sh $(BIN)/python -m pytest -n 3 --dist loadfile --timeout-method thread

# An environment of its own: vLLM pins most of its libraries. VLLM=0.28.0 picks another version.
VLLM    ?= 0.32.0
ENGINES := $(VENV)-engines
$(ENGINES)/.installed-vllm-$(VLLM): scripts/engine_environment.sh
	rm -f $(ENGINES)/.installed-*
	scripts/engine_environment.sh $(ENGINES) $(VLLM) $(PYTHON)
	@touch $@

$(ENGINES)/model/model.safetensors: | $(ENGINES)/.installed-vllm-$(VLLM)
	$(ENGINES)/bin/dynamo export $(ENGINES)/model

test-engines: $(ENGINES)/model/model.safetensors  ## tests on real vLLM for CPUs, 2.5 GB; VLLM=0.28.0
	DYNAMO_TEST_ENGINE_MODEL=$(ENGINES)/model $(ENGINES)/bin/python -m pytest \
		-W default::pytest.PytestUnraisableExceptionWarning tests/engines $(ARGS)

# PyTorch's build for CPUs is enough: no test needs a card. TORCH=torch-2.13.0+cpu-....whl picks a file.
TORCH      ?= torch==2.13.0
TORCH_VENV := $(VENV)-torch
$(TORCH_VENV)/.installed: scripts/torch_environment.sh | $(VENV)/.installed-test
	@echo "make: installing $(TORCH) and Triton into $(TORCH_VENV), once: 2 GB, or 8 GB if pip finds the build for cards"
	@scripts/torch_environment.sh $(TORCH_VENV) $(VENV) "$(TORCH)"
	@touch $@

test-torch: setup $(TORCH_VENV)/.installed  ## tests of the native engine on PyTorch and Triton, 2 GB
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/isolated.sh $(TORCH_VENV)/bin/python -m pytest tests/unit/inference_torch $(ARGS)

# Clients pin each other's libraries: uv makes an environment for each program, node's share a folder.
CLIENTS := $(VENV)-clients
$(CLIENTS)/.installed: tests/clients/package.json $(wildcard tests/clients/*_client.py)
	@test -x $(CLIENTS)/uv/bin/uv || { $(PYTHON) -m venv $(CLIENTS)/uv && $(CLIENTS)/uv/bin/python -m pip install --quiet uv; }
	@echo "make: installing clients into $(CLIENTS) and tests/clients/node_modules, 1.5 GB, once"
	@for program in tests/clients/*_client.py; do \
		UV_CACHE_DIR=$(CLIENTS) $(CLIENTS)/uv/bin/uv sync --quiet --script $$program || exit 1; done
	@cd tests/clients && npm install --silent --no-audit --no-fund --no-package-lock
	@touch $@

test-clients: setup $(CLIENTS)/.installed  ## clients of other projects, 1.5 GB; needs npm
	$(BIN)/python -m pytest tests/clients $(ARGS)

check: setup  ## format, lint, types, layers, sizes, wording, reference pages
	@+$(MAKE) --no-print-directory --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=line) check-types check-rest

# Types take as long as all the rest. A line of output is one piece, whichever half says it.
.PHONY: check-types check-rest
check-types:
	$(BIN)/mypy

check-rest:
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_shape.py
	$(BIN)/python scripts/check_words.py
	$(BIN)/python scripts/reference.py --check
	$(BIN)/shellcheck --external-sources deploy/*.sh scripts/*.sh container/*.sh
	$(BIN)/hadolint --failure-threshold warning deploy/Dockerfile container/Dockerfile.*

format: setup  ## format and mend what can be mended
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --quiet --fix .

lock:  ## pin all packages with hashes in requirements/; ARGS=--upgrade takes the newest
	test -x $(VENV)-lock/bin/uv || { $(PYTHON) -m venv $(VENV)-lock && $(VENV)-lock/bin/python -m pip install --quiet uv; }
	$(PYTHON) scripts/lock.py --uv $(VENV)-lock/bin/uv $(ARGS)

docs: setup  ## write docs/reference anew from the code
	$(BIN)/python scripts/reference.py

bench: setup  ## frontend CPU with mock workers (benchmarks/)
	$(BIN)/python benchmarks/frontend_cpu.py $(ARGS)

faults: setup  ## every fault on all planes, minutes; writes docs/faults.md
	$(BIN)/python scripts/faults.py $(ARGS)

fuzz: setup  ## frames, HTTP, JSON and answers bent at random, 10 minutes each; ARGS="--seconds 60"
	$(BIN)/python scripts/fuzz.py $(ARGS)

oracle:  ## make the native engine's reference answers anew (torch and transformers, large)
	test -x $(VENV)-oracle/bin/python || $(PYTHON) -m venv $(VENV)-oracle
	$(VENV)-oracle/bin/python -m pip install --quiet --editable '.[oracle]'
	$(VENV)-oracle/bin/python scripts/template_oracle.py
	$(VENV)-oracle/bin/python scripts/shapes_oracle.py
	$(VENV)-oracle/bin/python scripts/oracle.py $(ARGS)

clean:  ## remove caches and .venv
	rm -rf $(VENV) $(VENV)-lock $(VENV)-oracle $(TORCH_VENV) $(ENGINES) $(CLIENTS) tests/clients/node_modules build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
