# Everything a person or CI runs. `make help` lists the targets.
# PY=/path/to/python uses an environment that is already complete instead of creating one.

VENV ?= .venv
PYTHON ?= python3
PY ?= $(VENV)/bin/python
TORCH ?= torch==2.13.0
CUDA_SUITE ?= base-b-test-1-gpu-large
AMD_SUITE ?= stage-b-test-1-gpu-large-amd

export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))

# The stamps are needed only when the environment is ours to build.
OWN_ENV := $(filter $(VENV)/bin/python,$(PY))
RUN_ENV := $(if $(OWN_ENV),$(VENV)/.ready-run)
TEST_ENV := $(if $(OWN_ENV),$(VENV)/.ready-test)
DEV_ENV := $(if $(OWN_ENV),$(VENV)/.ready-dev)
DOCS_ENV := $(if $(OWN_ENV),$(VENV)/.ready-docs)
PIP_INSTALL = $(VENV)/bin/python -m pip install -qq --constraint scripts/constraints.txt

.PHONY: help demo test test-long test-cuda test-amd check format lint types gates unit args-doc docs docs-drawings parity audit clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

demo: $(RUN_ENV) ## serve the bundled model with lossless verify and compare with the default verify
	@$(PY) -m sglang.demo

test: $(TEST_ENV) ## every test that needs no GPU
	@$(PY) test/run_suite.py --backend cpu

test-long: $(TEST_ENV) ## the same and the long ones
	@$(PY) test/run_suite.py --backend cpu --nightly

test-cuda: $(TEST_ENV) ## tests registered for an NVIDIA GPU
	@$(PY) test/run_suite.py --backend cuda --suite $(CUDA_SUITE)

test-amd: $(TEST_ENV) ## tests registered for an AMD GPU
	@$(PY) test/run_suite.py --backend amd --suite $(AMD_SUITE)

check: format lint types gates unit ## what CI runs first

format: $(DEV_ENV) ## formatting (changes nothing; `ruff format` does)
	@$(PY) -m ruff format --check .

lint: $(DEV_ENV) ## lint
	@$(PY) -m ruff check .

types: $(DEV_ENV) ## types on the public edges
	@$(PY) scripts/check_types.py

gates: $(DEV_ENV) ## file and function sizes, import directions, generated documentation
	@$(PY) scripts/check_sizes.py
	@$(PY) scripts/check_imports.py
	@$(PY) scripts/generate_server_arguments.py --check

unit: $(TEST_ENV) ## unit tests alone
	@$(PY) test/run_suite.py --backend cpu --suite unit

args-doc: $(RUN_ENV) ## write the documentation of the server arguments again
	@$(PY) scripts/generate_server_arguments.py

docs: $(DOCS_ENV) ## check the documentation and build it as a site in site/
	@$(PY) scripts/docs_drawings.py --check
	@$(PY) scripts/docs_check.py
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

docs-drawings: $(RUN_ENV) ## write the documentation's pictures and tables of figures again
	@$(PY) scripts/docs_drawings.py

parity: $(RUN_ENV) ## prove on this machine that lossless verify changes nothing
	@$(PY) -m sglang.parity --model-path demo --algorithms NEXTN,DFLASH,DSPARK

audit: $(TEST_ENV) ## compile the kernels for every target and read their machine code
	@$(PY) -m sglang.kernels.audit

clean: ## remove the environment and what the tools left
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache

# torch comes first and by exact version: other packages would otherwise choose a build for it.
$(VENV)/.ready-torch:
	@echo "creating $(VENV) and installing $(TORCH) (once)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python scripts/has_torch.py || $(VENV)/bin/python -m pip install -qq "$(TORCH)"
	@touch $@

$(VENV)/.ready-run: $(VENV)/.ready-torch pyproject.toml scripts/constraints.txt
	@echo "installing the engine (once)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-torch pyproject.toml scripts/constraints.txt
	@echo "installing the engine and its test tools (once)"
	@$(PIP_INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.ready-run

$(VENV)/.ready-dev: $(VENV)/.ready-test
	@echo "installing the development tools (once)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-test
	@echo "installing the documentation tools (once)"
	@$(PIP_INSTALL) --editable '.[docs]'
	@touch $@
