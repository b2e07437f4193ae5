# Two commands set everything up on a machine with Python >= 3.10, pip and make:
#   make demo     text from a real model        make test     the tests
# Variables: PYTHON (interpreter to make .venv with), CONSTRAINTS (constraints/cuda.txt on a GPU
# machine), PIP_FLAGS (for example an index of CPU builds), ARGS (more arguments for pytest).
# Written for make 3.81 and a plain POSIX shell, so that macOS runs it too.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/cpu.txt
PIP_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
# A stamp is named after the contents of what decides an installation: the second run of a target
# installs nothing, an edit of either file (or another CONSTRAINTS) installs once more.
KEY := $(shell cat pyproject.toml $(CONSTRAINTS) | cksum | cut -d' ' -f1)
RUNTIME := $(VENV)/.installed-$(KEY)
DEV := $(VENV)/.installed-dev-$(KEY)
BROWSER := $(VENV)/.installed-browser-$(KEY)
# The exact torch stands on the command line beside the package, see $(CONSTRAINTS).
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' $(CONSTRAINTS))
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) \
	-c $(CONSTRAINTS) $(TORCH)

# Tests run on one thread: two OpenMP threads beside a busy neighbour can be 100 times slower.
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

.PHONY: help demo test slow lint format lessons browser clean

help:
	@sed -n 's/^# \{0,1\}//;1,5p' Makefile
	@echo "Targets: demo test slow lint format lessons browser clean"

demo: $(RUNTIME)
	$(BIN)/minivllm generate --model tiny --seed 1 \
		"Once upon a time" \
		"Once upon a time, there was a small dog" \
		"One day, a girl named Mia found a key" \
		"Tom and Lily were best friends"
	@echo "next: $(BIN)/minivllm fetch smollm2, then $(BIN)/minivllm chat --model smollm2"

test: $(DEV)
	$(PYTEST) -m "not slow" $(ARGS)

slow: $(DEV)
	$(PYTEST) -m slow $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Executes every lesson in place, on the CPU: the only way in which committed outputs are made.
lessons: $(DEV)
	$(BIN)/python -m minivllm.course lessons $(ARGS)

# A lesson in a real JupyterLab in a real browser: Debian's chromium, never a downloaded one.
browser: $(BROWSER)
	$(BIN)/python tests/lab_browser.py $(ARGS)

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "minivllm needs Python >= 3.10; try: make PYTHON=python3.12 ..."; exit 1; }
	@# Some systems ship Python without ensurepip; pip can then install itself from outside.
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install -q pip; }

$(RUNTIME): | $(BIN)/python
	@echo "installing into $(VENV) (once; some minutes and 2.5 GB)"
	$(INSTALL) -e .
	@touch $@

# The dev set contains the runtime set, so both stamps are set.
$(DEV): | $(BIN)/python
	@echo "installing into $(VENV) (once; some minutes and 2.5 GB)"
	$(INSTALL) -e '.[dev]'
	@touch $(RUNTIME) $@

$(BROWSER): | $(BIN)/python
	@echo "installing JupyterLab and selenium into $(VENV) (once)"
	$(INSTALL) -e '.[dev,lessons,browser]'
	@touch $(RUNTIME) $(DEV) $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
