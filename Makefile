# One verb per habit. A verb sets up what it needs, once: an environment in .venv, with the versions of constraints.txt.
# An environment of your own is used as it is: make test PYTHON=python3. Another version of torch has another one:
# make test TORCH=2.11.0.

BASE_PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
PYTEST_ARGS ?=
DEMO_ARGS ?=
ifeq ($(origin PYTHON), undefined)
PYTHON := $(VENV)/bin/python
demo_ready := $(VENV)/demo.stamp
dev_ready := $(VENV)/dev.stamp
else
demo_ready := check-demo
dev_ready := check-dev
endif
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export BASE_PYTHON TORCH MAKECMDGOALS

.PHONY: help venv compiler check-demo check-dev demo test test-all gpu-test gpu-test-all gpu-sanitize gpu-random lint format bench manifests wheel

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(VENV)/dev.stamp ## the environment of all verbs, and nothing run in it

$(VENV)/demo.stamp: pyproject.toml constraints.txt tools/environment.sh
	@tools/environment.sh venv $(VENV) demo
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt tools/environment.sh
	@tools/environment.sh venv $(VENV) dev
	@touch $(VENV)/demo.stamp $@

check-demo check-dev: check-%:
	@tools/environment.sh check $(PYTHON) $*

compiler:
	@tools/environment.sh compiler

# Where there is a GPU, the demo runs on it.
demo: $(if $(wildcard /dev/nvidiactl),,compiler) $(demo_ready) ## a sentence encoder and a Llama MLP, quantised
	@$(PYTHON) examples/11_minilm/demo.py $(DEMO_ARGS)
	@$(PYTHON) examples/12_llama_mlp.py

# Neighbouring tests stay with one worker, so that a module is set up once; an idle worker takes over half of what
# another has left.
WORKERS ?= 2
PYTEST = $(PYTHON) -m pytest --dist worksteal --ignore tests/device

# What is computed in C++ is compiled with -O0 after jitgen's own flags, which takes a quarter of the time of -O3; only
# tests marked `optimised` have jitgen's own. In test-all every test has them.
test: export JITGEN_CXXFLAGS = -O0
test: compiler $(dev_ready) ## one case of everything; kernels are kept in cache/test-store
	$(PYTEST) -n $(WORKERS) -m 'not slow and not gpu' $(PYTEST_ARGS)

test-all: compiler $(dev_ready) ## every case, and more random ones
	HYPOTHESIS_EXAMPLES=60 $(PYTEST) -n $(WORKERS) -m 'not gpu' $(PYTEST_ARGS)

# A test that hangs is killed and named. GPU_WORKERS processes share the tests, by default two fewer than processors;
# DEVICE_TESTS_DIR is where the record goes, by default docs/measured, and DEVICE_TESTS_COMMIT its commit where there is
# no git.
GPU_TEST = $(PYTHON) tools/gpu_test.py $(if $(GPU_WORKERS),--workers $(GPU_WORKERS))

gpu-test: $(dev_ready) ## needs an NVIDIA GPU; writes docs/measured/device-tests-*.json
	$(GPU_TEST) -- $(PYTEST_ARGS)

gpu-test-all: $(dev_ready) ## every case on a GPU
	$(GPU_TEST) --marks gpu --seconds 3600 -- $(PYTEST_ARGS)

gpu-sanitize: $(dev_ready) ## compute-sanitizer's four tools over every family; docs/measured/device-sanitizer-*.json
	$(PYTHON) tools/gpu_sanitize.py $(SANITIZE_ARGS)

gpu-random: $(dev_ready) ## 2,000 random programs in each dialect, and their gradients; docs/measured/device-programs-*.json
	$(PYTHON) tools/gpu_programs.py $(RANDOM_ARGS)

lint: $(dev_ready) ## ruff, mypy, checkers of types over what users write, and whether a GPU has run this code
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --strict --follow-imports=silent tests/user_code
	$(PYTHON) -m basedpyright --pythonpath "$$($(PYTHON) -c 'import sys; print(sys.executable)')" -p tests/user_code
	@$(PYTHON) tools/gpu_code.py

format: $(dev_ready) ## rewrite in the house style
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .

bench: $(dev_ready) ## the figures of docs/measured, as a table and as JSON
	$(PYTHON) -m jitgen bench

manifests: $(dev_ready) ## record cache/manifests again: what `jitgen prewarm llama-3-8b` and the like build
	$(PYTHON) tools/record_manifests.py

wheel: $(dev_ready) ## dist/jitgen-*-py3-none-any.whl
	$(PYTHON) -m build --wheel --no-isolation
