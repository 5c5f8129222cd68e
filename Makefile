# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := runs/demo

.PHONY: demo test test-slow lint typecheck setup clean

demo: setup            ## train the demo model; extra settings: make demo ARGS="trainer.max_steps=5"
	$(BIN)/python -m easyrl.demo --run-dir $(RUN) $(ARGS)

test: setup lint typecheck   ## lint, types and all fast tests
	$(BIN)/python -m pytest

test-slow: setup       ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy sees the folders as they are imported: dataloaders/ etc. inside easyrl/.
typecheck: setup
	rm -rf .typecheck && mkdir -p .typecheck/easyrl
	ln -s ../../dataloaders ../../inference_client ../../kernels .typecheck/easyrl/
	cd easyrl && for f in *; do case $$f in __pycache__) ;; *) ln -s ../../easyrl/$$f ../.typecheck/easyrl/$$f;; esac; done
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml -p easyrl

setup: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .typecheck build *.egg-info
