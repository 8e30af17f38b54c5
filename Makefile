# One command each; every target sets up what it needs on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SERVES := $(VENV)/.serves
NATIVE := $(shell find csrc/cpu csrc/residency -name '*.cpp' -o -name '*.h')

# Where two targets are asked for, the second runs even if the first has failed.
MAKEFLAGS += --keep-going

.PHONY: serve test test-long campaign check bench test-gpu bench-gpu first-day wheels libraries clean

# The native library is compiled in place while packages come, so pip is to leave it alone: to pip
# it is optional, and with such a compiler it is missing. The CPU build of torch is pinned first: a
# looser request would pull gigabytes of CUDA.
BUILD = -W ignore csrc/build.py -q build_ext --inplace
COMMA := ,
NEW_ENOUGH = 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) \
	else "ESS needs Python 3.11 or newer, this is " + v + ": make ... PYTHON=python3.12")'
define INSTALL
	@$(PYTHON) -c $(NEW_ENOUGH)
	@echo "installing into $(VENV): torch for the CPU, packages, the native library; some minutes"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q $(2) 'setuptools>=77' wheel
	$(BIN)/python $(BUILD) & native=$$!; trap 'kill $$native' INT TERM; \
	{ $(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q $(2) torch==2.13.0; } && \
	CC=false CXX=false $(BIN)/pip install -q $(2) --no-build-isolation -e '.[$(1)]' && \
	wait $$native
	touch $(SERVES)
endef

# The tests import a tenth of what is installed: only that is compiled, when it is first imported.
$(STAMP): pyproject.toml $(NATIVE)
	$(call INSTALL,dev$(COMMA)oracle$(COMMA)router,--no-compile)
	touch $@

# To serve needs a third of what the checks need.
$(SERVES): pyproject.toml $(NATIVE)
	$(call INSTALL,serve$(COMMA)guest)

# Of what comes with ESS, or of MODEL=smollm2, or of MODEL=folder.
serve: $(SERVES)
	$(BIN)/ess serve $(MODEL)

# Two workers on two cores: a second thread of each would only wait. They are forks of a process that
# has collected the tests (tests/support/collected.py). Each begins with its share of the tests as
# they lie in their files; a worker without tests takes half of what another has left. Hundreds of
# processes are started, and each would compile what no other has kept. Slow tests wait for ends,
# limits and other processes: with them four workers keep two cores busy. A test that hangs fails by
# name after TEST_LIMIT_S; where it swallows even that, its worker prints where it stands and ends
# 30 s later, and another worker goes on.
TEST_LIMIT_S ?= 300
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= timeout -k 30 2400 $(BIN)/pytest -n 2 \
	--dist worksteal --timeout $(TEST_LIMIT_S) -o faulthandler_exit_on_timeout=true \
	-o faulthandler_timeout=$(shell expr $(TEST_LIMIT_S) + 30)

# Style and types are checked beside the tests, on one core of two for half a minute. Hypothesis
# draws the same examples in each run, so that a run fails by what has changed; `make check` and
# pytest alone draw others.
test: $(STAMP)
	{ $(STYLE) && $(TYPES); } & types=$$!; \
	$(PYTEST) -n 4 --hypothesis-seed=0 -m "not long and not gpu"; tests=$$?; \
	wait $$types && exit $$tests

# Campaigns: the same checks as in `make test`, over many more inputs.
test-long: $(STAMP)
	$(PYTEST) -m "long and not gpu"

# Whole workers in one thread, with faults from seeds: what fails is cut down and kept as a file.
SEEDS ?= 500
FIRST ?= 0
campaign: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign --seeds $(SEEDS) --first $(FIRST)

STYLE = $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports
TYPES = $(BIN)/mypy --strict -p ess

check: $(STAMP)
	$(STYLE)
	$(TYPES)
	$(PYTEST) -m "not slow and not gpu"

bench: $(STAMP)
	$(BIN)/ess-bench all --smoke

# These also run from a bare checkout on a machine with a GPU: its own Python with NumPy, pytest and
# cuda-python is enough. Without a device the tests are skipped and nothing is measured. All print as
# they go and end in time; with OUT=folder what they print and measure is kept there too. After a run
# that was cut off: BEHIND=its print leaves out tests that passed there, and ONLY="names" takes these
# benchmarks alone; a single one has no limit. What such a machine lacks, and cannot fetch, another
# one fetches by `make wheels`; with that folder beside the checkout it is unpacked and used.
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,python3)
GPU_CAN_BUILD = 'import sys, setuptools as s; sys.exit(int(s.__version__.split(".")[0]) < 77)'
GPU_NATIVE = $(GPU_PYTHON) -c $(GPU_CAN_BUILD) 2>/dev/null && $(GPU_PYTHON) $(BUILD)
GPU_LIMIT_S ?= 480
GPU_DAY_S ?= 840
GPU_JSON = $(if $(OUT),$(OUT)/bench-gpu.json,bench/results/gpu.json)
KEPT = 2>&1 $(if $(OUT),| tee $(OUT)/$@.txt)

WHEELS := build/wheels
CARRIED := build/site
COMPARED := build/compared
WHEELS_FOR ?= 3.12
SERVE_ALONE = annotated-doc annotated-types anyio attrs click cyclopts docstring-parser docutils \
	fastapi h11 httptools idna llguidance msgspec opentelemetry-api pydantic pydantic-core pyzmq \
	rich-rst starlette typing-extensions typing-inspection uvicorn

test-gpu bench-gpu first-day: export PYTHONUNBUFFERED = 1
test-gpu bench-gpu first-day: export PYTHONPATH := $(if $(wildcard $(WHEELS)),$(CURDIR)/$(CARRIED):)$(PYTHONPATH)
test-gpu bench-gpu first-day: SHELL := /bin/bash
test-gpu bench-gpu first-day: .SHELLFLAGS := -o pipefail -c
test-gpu bench-gpu first-day: $(if $(wildcard $(WHEELS)),$(CARRIED))
bench-gpu first-day: $(if $(wildcard build/libraries),$(COMPARED))

define FETCH
	rm -rf $(1)
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --implementation cp \
		--python-version $(WHEELS_FOR) $(foreach n,17 24 27 28 31,--platform manylinux_2_$(n)_x86_64) \
		--platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d $(1) $(2)
endef

# What `ess serve` and `ess doctor` need beside torch and what its images bring.
wheels:
	$(call FETCH,$(WHEELS),$(SERVE_ALONE))

# FlashMLA and DeepGEMM for torch 2.11 on CUDA 13; torch 2.13 takes sgl-deep-gemm 0.1.7. They compile
# as they run and would be in use in every engine, so only benchmarks that compare with them see them.
LIBRARIES ?= sgl-flash-mla==1.0.0 sgl-deep-gemm==0.1.5.post1 apache-tvm-ffi==0.1.11
libraries:
	$(call FETCH,build/libraries,$(LIBRARIES))

# Wheels of another Python than the machine's cost the servers, and not the day.
$(CARRIED): $(wildcard $(WHEELS)/*.whl)
$(COMPARED): $(wildcard build/libraries/*.whl)
$(CARRIED) $(COMPARED):
	rm -rf $@
	mkdir -p $@
	$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $@ $^ || \
		echo "the wheels of $@ cannot be unpacked: what needs these packages is skipped"
	touch $@

test-gpu:
	$(GPU_NATIVE) || echo "no native library (setuptools 77 builds it): what needs it is skipped"
	@mkdir -p $(or $(OUT),bench/results)
	$(GPU_PYTHON) -m tests.gpu --limit-s $(GPU_LIMIT_S) $(addprefix --behind ,$(BEHIND)) $(KEPT)

bench-gpu:
	$(GPU_NATIVE) || echo "no native library (setuptools 77 builds it): no copy engine"
	@mkdir -p $(or $(OUT),bench/results)
	$(GPU_PYTHON) -m ess.bench.gpu.suite $(if $(ONLY),--only $(ONLY)) --out $(GPU_JSON) $(KEPT)

# Both and `ess doctor` in one report, what is worth most first. Where a call has a limit, give one a
# little lower: GPU_DAY_S=570. The next call goes on, also elsewhere with build/first-day beside it.
first-day:
	$(GPU_PYTHON) -m tests.gpu.first_day --limit-s $(GPU_DAY_S) $(if $(OUT),--out $(OUT))

clean:
	rm -rf $(VENV) build dist *.egg-info ess/_native*.so
