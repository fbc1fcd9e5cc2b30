# make quickstart   from text to a pretrained XLNet, in one go       (ARGS="text.source='my/*.txt' name=mine")
# make test         linters, types, import contracts, tests           (ARGS="-k resume" for some of the tests)
# make test-long    slow tests, and every property test with all its examples
# make test-gpu     tests of kernels, CUDA graphs and commands on a GPU

PYTHON ?= python3
ARGS ?=
# number of processes that run tests
WORKERS ?= 2
# to keep a torch that is installed already: VENV=--system-site-packages CONSTRAINTS=/dev/null
VENV ?=
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
INSTALLED := .venv/.installed

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: quickstart test test-long test-gpu lint install clean

quickstart: $(INSTALLED)
	$(BIN)/python pretrain/quickstart.py --config configs/pretrain/quickstart.yaml $(ARGS)

test: $(INSTALLED)-dev lint
	$(BIN)/python -m pytest -m "not long" -n $(WORKERS) --dist loadgroup -rs $(ARGS)

test-long: $(INSTALLED)-dev
	XLPRE_TEST_EXAMPLES=all $(BIN)/python -m pytest -m "long or hypothesis" -n $(WORKERS) --dist loadgroup -rs $(ARGS)

test-gpu: $(INSTALLED)-dev
	XLPRE_TEST_DEVICE=cuda $(BIN)/python -m pytest -n $(WORKERS) -rs $(ARGS) tests/gpu tests/unit/pretrain/test_cuda_graphs.py \
	    tests/unit/model/kernels/triton --ignore tests/unit/model/kernels/triton/test_interpreter.py

lint: $(INSTALLED)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "xlpre needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) .venv
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e .
	touch $@

$(INSTALLED)-dev: $(INSTALLED)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,lm-eval]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
