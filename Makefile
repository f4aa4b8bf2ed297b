# Ten verbs. PIP_ARGS passes extra arguments to pip; SWEEP_ARGS to the sweep; PYTEST_ARGS to pytest.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS ?= demo,dev

.PHONY: setup sweep test test-vllm test-gpu lint types bench docs clean

.venv/.installed: pyproject.toml constraints.txt install.sh
	PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" ./install.sh $(PIP_ARGS)
setup: .venv/.installed
sweep: setup
	$(BIN)/fsdpbench sweep $(SWEEP_ARGS)
test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)
.venv-vllm/.installed: constraints-vllm.txt install_vllm.sh
	PYTHON="$(PYTHON)" ./install_vllm.sh $(PIP_ARGS)
test-vllm: setup .venv-vllm/.installed
	FSDPBENCH_REQUIRE_VLLM=1 $(BIN)/python -m pytest tests/vllm -m vllm $(PYTEST_ARGS)
test-gpu: setup
	$(BIN)/python -m pytest -m "gpu or multi_gpu" $(PYTEST_ARGS)
lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell
types: setup
	$(BIN)/mypy
bench: setup
	$(BIN)/python -m pytest benchmarks --benchmark-only $(PYTEST_ARGS)
docs: setup
	$(BIN)/python docs/generate.py
clean:
	rm -rf .venv .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
