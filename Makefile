# Every target makes the virtual environment first, so each works on a machine that has only Python 3.11 and make.
VENV := .venv
BIN := $(VENV)/bin
# An environment that is there keeps its Python. For a new one it is python3, or a better built one: that is asked once,
# where it is needed, and never if PYTHON is given.
HAS_PIP := $(BIN)/python -m pip --version >/dev/null 2>&1
CHOOSE := $(HAS_PIP) && echo $(BIN)/python || python3 scripts/choose_python.py || echo python3
PYTHON ?= $(eval PYTHON := $(shell $(CHOOSE)))$(PYTHON)
STAMP := $(VENV)/.installed
JOBS ?= 3
HERE := not gpu and not soak and not slurm and not deepspeed
# A worker that crashes ends the run: with one in its place, pytest-xdist would wait for ever (3.8, --dist loadfile).
FILES_AT_ONCE := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Without bytecode, every process of pytest would rewrite the asserts of its plugins anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
ALONE := $$(grep -rlF mark.alone --include='test_*.py' tests)

.PHONY: help browser install demo test quick test-seconds test-slurm test-deepspeed test-ray ruff lint docs docs-serve bench bench-gpu soak clean

help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## the virtual environment in .venv, with the tested versions

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "drivetrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Remedy: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. Remedy (Debian, Ubuntu): apt-get install python3-venv"; exit 1; }
	@echo "Setting up $(VENV) with the versions of constraints.txt (about a minute the first time)"
	@$(HAS_PIP) || $(PYTHON) -m venv --clear $(VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## train a mixture of experts on handwritten digits: it grows, sleeps, and shows the results
	@$(BIN)/drivetrain train digits-moe

# Tests draw pages in a real browser. It is installed where it can be; otherwise pytest lists these tests as skipped.
APT := DEBIAN_FRONTEND=noninteractive timeout 120 apt-get -qq
HAS_BROWSER := command -v chromium >/dev/null || command -v google-chrome >/dev/null
browser:
	@$(HAS_BROWSER) || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo "Installing Chromium, for the tests of pages" && { $(APT) update && \
	    $(APT) install -y --no-install-recommends --download-only chromium && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 && \
	  $(HAS_BROWSER); } || echo "There is no Chromium, and it cannot be installed: tests that draw pages are skipped"

# mypy runs on one core for half a minute: beside the tests. What it finds is shown at once, and fails the target.
test: ruff browser  ## lint and every test that needs no GPU, three files at a time (JOBS=1: one), then those that measure time
	@{ found=$$($(BIN)/mypy 2>&1); code=$$?; echo "mypy: $$found"; exit $$code; } & types=$$!; \
	  $(BIN)/python -m pytest -m '$(HERE) and not alone' -n $(JOBS) $(FILES_AT_ONCE); tests=$$?; \
	  wait $$types || { echo "mypy failed: its messages stand above, or run make lint"; exit 1; }; exit $$tests
	@$(BIN)/python -m pytest -m '$(HERE) and alone' --warm --reruns 2 $(ALONE)

quick: lint  ## lint and three quarters of the tests in less than two minutes: those that take less than 0.2 s each
	@$(BIN)/python -m pytest -m '$(HERE) and not alone' --quick -q -n 2 $(FILES_AT_ONCE)

test-seconds: $(STAMP)  ## measure what each test takes, for the order of make test and the choice of make quick
	@$(BIN)/python -m pytest -m '$(HERE) and not alone' --measure-cpu -n $(JOBS) $(FILES_AT_ONCE)

ruff: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

lint: ruff  ## ruff and mypy
	@$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, in site/; a broken link or reference fails (make test builds it, too)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet, which hides warnings, strict would not fail
	@echo "site/index.html"

docs-serve: $(STAMP)  ## the same on http://127.0.0.1:8000, built again whenever a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

bench: $(STAMP)  ## measure, and write JSON to benchmarks/results (ARGS="side-by-side --quick": only that, one round)
	@$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: $(STAMP)  ## all trainers side by side on a GPU in 240 s (ARGS=--missing: what was left out); then the tables
	@$(BIN)/python -m benchmarks side-by-side-gpu --budget 195 $(ARGS)
	@$(BIN)/python -m benchmarks table

soak: $(STAMP)  ## the long runs: deep property tests, repeated crashes and hangs
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m soak --timeout 3600

test-slurm: $(STAMP)  ## jobs in a real SLURM, started for the tests (needs root, slurm-wlm, munge)
	@$(BIN)/python -m pytest -m slurm

test-deepspeed: $(STAMP)  ## training with DeepSpeed, which is installed for it (not part of make install)
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,deepspeed]'
	@$(BIN)/python -m pytest -m deepspeed

test-ray: $(STAMP)  ## jobs on a Ray cluster of two hosts; ray is installed for it (needs root and ip)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	@$(BIN)/python -m pytest tests/launch/test_ray.py

clean:  ## remove the virtual environment and caches (never the runs)
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
