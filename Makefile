# One command each; every target sets up what it needs on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NATIVE := $(wildcard csrc/cpu/*.cpp csrc/cpu/*.h)

.PHONY: serve test check bench test-gpu bench-gpu clean

# The CPU build of torch is pinned first: a looser request would pull gigabytes of CUDA.
$(STAMP): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q setuptools wheel
	$(BIN)/pip install -q --no-build-isolation -e '.[dev,oracle]'
	touch $@

serve: $(STAMP)
	$(BIN)/ess serve

test: check
	$(BIN)/pytest -n 2 --dist loadfile -m "slow and not gpu"

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy --strict -p ess
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not gpu"

bench: $(STAMP)
	$(BIN)/ess-bench all --smoke

# Until the CUDA kernels are here these two say so; they never pretend to have measured.
test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu; status=$$?; test $$status -eq 0 -o $$status -eq 5

bench-gpu: $(STAMP)
	@echo "There are no CUDA kernels yet, so there is nothing to measure on a GPU."

clean:
	rm -rf $(VENV) build dist *.egg-info ess/_native*.so
