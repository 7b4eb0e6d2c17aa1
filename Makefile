# Everything starts from these; each does its own set-up.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export TF_CPP_MIN_LOG_LEVEL ?= 2

PARALLEL ?= -n 2 --dist loadfile  # a process of tests per core, a file stays in one

PYTHONS ?= 3.10 3.12 3.13
# A python3.x on the PATH that starts, or one of pyenv's.
python_of = $(firstword $(shell python$1 -c 'import sys; print(sys.executable)' 2>/dev/null) \
	$(wildcard $(HOME)/.pyenv/versions/$1.*/bin/python))
FOUND = $(strip $(foreach version,$(PYTHONS),$(if $(call python_of,$(version)),$(version))))
# The tests of these parts but for those that need torch, TensorFlow or Ray; doctests of two.
FRAMEWORKS := $(wildcard $(foreach word,ray address collective epochs hosts results signals strangers,tests/*/test_*$(word)*.py))
PARTS := $(wildcard $(foreach part,rules center launch monitor faults,tests/$(part)/test_*.py))
CORE := $(wildcard tests/test_*.py) $(filter-out $(FRAMEWORKS),$(PARTS)) src/springline/rules src/springline/monitor

.PHONY: help setup demo demo-digits test test-all test-pythons lint format bench docs docs-serve clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## a .venv with everything that demo and tests need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,tensorflow,keras,accelerate,huggingface,lightning,ray,plots,docs,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps tf_keras  # it asks for tensorflow, which is tensorflow-cpu here
	@touch $@

demo: setup  ## a small GPT on two workers, one of which is killed, beside one process with all the data
	env -u OMP_NUM_THREADS -u OPENBLAS_NUM_THREADS $(BIN)/python examples/demo.py

demo-digits: setup  ## three processes learn digits in plain numpy, under each rule: table and plot
	$(BIN)/python examples/numpy_workers.py

test: lint  ## all tests but the slow ones
	$(BIN)/python -m pytest -q $(PARALLEL)

test-all: lint  ## all tests
	$(BIN)/python -m pytest -q $(PARALLEL) -m ''

test-pythons:  ## the tests that need numpy only, on each other Python that is found
	@test -n "$(FOUND)" || { echo "Found none of Python $(PYTHONS)."; exit 1; }
	@$(MAKE) --no-print-directory $(FOUND:%=test-python-%)
	@echo "Passed on Python: $(FOUND). Not found: $(or $(filter-out $(FOUND),$(PYTHONS)),none)."

test-python-%: .venvs/%/.ready
	.venvs/$*/bin/python -m pytest -q $(PARALLEL) $(CORE)

.PRECIOUS: .venvs/%/.ready
.venvs/%/.ready: pyproject.toml
	$(call python_of,$*) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[plots,test]'
	@touch $@

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## what an exchange costs, in memcpys: docs/exchange.md and its plot
	$(BIN)/python benchmarks/exchange.py

docs: setup  ## the documentation as a web site, in site/
	$(BIN)/mkdocs build --strict

docs-serve: setup  ## the same on http://127.0.0.1:8000, made again whenever a page changes
	$(BIN)/mkdocs serve --strict

clean:  ## forget the .venv and the caches
	rm -rf .venv .venvs benchmarks/peers/.venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
