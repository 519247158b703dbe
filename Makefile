# What a person or CI runs; `make` alone lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := torch,eval,dev
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check soak format clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# PyTorch goes first and alone, so that nothing else in the resolution can choose another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

demo: $(INSTALLED)  ## compare four policies on the embedded pair of models
	$(BIN)/stepspec eval gsm-mini --limit 30 --policy target --policy token --policy specreason --policy stepspec

test: $(INSTALLED)  ## run every test but the soak tests
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

soak: $(INSTALLED)  ## run the tests that are too long for every change
	$(BIN)/python -m pytest -m soak --timeout 0

format: $(INSTALLED)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment, caches and built packages; runs/ stays
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
