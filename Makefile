# make serve [MODEL=/path/to/hf-folder] [ARGS="--port 8001"]
# make test, make check; make help lists everything.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check
# On a public package index torch 2.13.0 for x86-64 Linux is a CUDA build of some gigabytes; `make
# setup` says which build it is, whether it suits the machine, and what else to set here.
TORCH ?= torch==2.13.0 triton==3.7.1
MODEL ?=
ARGS ?=
# Files of tests that run at the same time: on two cores two of them work while the others wait.
# ARGS="-n 0 …" for a debugger.
JOBS ?= 4

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-slow test-gpu conformance agents bfcl chart protos chaos docs lint format format-check types imports collect \
	check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(STAMP) ## make .venv with penstock in it
	@:

# What pip downloads: the large ones by name, and all together.
define TELL_DOWNLOADS
awk '/^ *Downloading .*\((.*B)\)/ && !/\.metadata/ { \
	size = $$(NF - 1); sub(/^\(/, "", size); \
	megabytes = size * ($$NF ~ /^GB/ ? 1000 : $$NF ~ /^MB/ ? 1 : $$NF ~ /^kB/ ? 0.001 : 0); \
	total += megabytes; \
	if (megabytes >= 10) { sub(/^ *Downloading /, "  "); print; fflush() } } \
	END { if (total >= 1000) printf "  %.1f GB downloaded\n", total / 1000; \
	else if (total) printf "  %.0f MB downloaded\n", total }'
endef

# Torch goes first: nothing else may choose its build.
$(STAMP): SHELL := bash
$(STAMP): .SHELLFLAGS := -o pipefail -c
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name it: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(firstword $(TORCH))"
	@$(PIP) $(TORCH) | $(TELL_DOWNLOADS)
	@gpu=$$(timeout 60 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1) || true; \
		cuda=$$($(BIN)/python -W ignore -c 'import torch; print(torch.version.cuda or "")'); \
		if [ "$$gpu" ] && [ "$$cuda" ]; then \
			echo "this machine has an $$gpu: torch is built for CUDA $$cuda and uses it"; \
		elif [ "$$gpu" ]; then \
			echo "torch is built for CPUs and does not use the $$gpu of this machine; a build for CUDA does:" >&2; \
			echo "  make setup TORCH='$(firstword $(TORCH)) --index-url https://download.pytorch.org/whl/cu130'" >&2; \
		elif [ "$$cuda" ]; then \
			echo "there is no NVIDIA GPU here, and torch is built for CUDA $$cuda; a smaller build for CPUs:"; \
			echo "  make setup TORCH='$(firstword $(TORCH)) --index-url https://download.pytorch.org/whl/cpu'"; \
		else \
			echo "there is no NVIDIA GPU here: torch is built for CPUs"; \
		fi
	@echo "installing penstock and its tools"
	@$(PIP) --editable '.[dev]' | $(TELL_DOWNLOADS)
	@touch $(STAMP)

serve: setup ## serve MODEL, or the built-in model
	@exec $(BIN)/penstock serve $(if $(MODEL),'$(MODEL)') $(ARGS)

# Hundreds of processes start from the same sources: what is compiled is kept.
test: setup ## run the tests, without the long ones
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		-m 'not slow and not gpu and not chaos' --timeout 300 $(ARGS)

test-slow: setup ## run the tests that take minutes
	@$(BIN)/python -m pytest -m 'slow and not gpu' --timeout 1800 $(ARGS)

test-gpu: setup ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu --timeout 1800 $(ARGS)

# The clients talk HTTP to a server from .venv, and have an environment of their own: 700 MB, no torch.
CLIENTS := build/clients
CLIENT_CASES := tests/conformance/clients
NODE_CASES := tests/conformance/node

conformance: setup $(CLIENTS)/.installed $(NODE_CASES)/node_modules ## run many clients against a server
	@$(BIN)/python -m pytest tests/conformance/test_clients.py $(ARGS)

$(CLIENTS)/.installed: $(CLIENT_CASES)/requirements.txt $(CLIENT_CASES)/constraints.txt
	@echo "installing clients into $(CLIENTS)"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -qq --disable-pip-version-check \
		-r $(CLIENT_CASES)/requirements.txt -c $(CLIENT_CASES)/constraints.txt
	@touch $@

$(NODE_CASES)/node_modules: $(NODE_CASES)/package-lock.json
	@if command -v npm >/dev/null; then npm ci --silent --prefix $(NODE_CASES) && touch $@; \
		else echo "there is no npm: clients for Node are left out"; fi

# Programs of 400 MB each, which is why they are not among the other clients.
AGENT_CASES := tests/conformance/agents

agents: setup $(AGENT_CASES)/node_modules ## run coding agents against a server
	@$(BIN)/python -m pytest tests/conformance/test_agents.py $(ARGS)

$(AGENT_CASES)/node_modules: $(AGENT_CASES)/package-lock.json
	@if command -v npm >/dev/null; then npm ci --silent --prefix $(AGENT_CASES) && touch $@; \
		else echo "there is no npm: coding agents are left out"; fi

# Only the data in it is read; nothing of it is installed.
bfcl: setup ## fetch the BFCL data, by which make test-slow checks tool calls
	@$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --dest build/bfcl bfcl-eval==2026.3.23

# Helm, versions 3 and 4, and the schemas of Kubernetes: 100 MB.
CHART := build/chart
CHART_CASES := tests/deploy

chart: setup $(CHART)/.installed ## lint and render the Helm chart, and judge what it renders to
	@$(BIN)/python -m pytest $(CHART_CASES) $(ARGS)

$(CHART)/.installed: $(CHART_CASES)/requirements.txt $(CHART_CASES)/fetch_helm.py
	@echo "fetching Helm and the schemas of Kubernetes into $(CHART)"
	@test -x $(CHART)/bin/python || $(PYTHON) -m venv $(CHART)
	@$(CHART)/bin/python -m pip install -qq --disable-pip-version-check -r $(CHART_CASES)/requirements.txt
	@$(CHART)/bin/python $(CHART_CASES)/fetch_helm.py $(CHART)
	@touch $@

# An older compiler: what it makes runs with every protobuf from 6.31 to the next major version.
PROTOC := build/protoc
protos: ## make the Python of the .proto files anew
	@test -x $(PROTOC)/bin/python || $(PYTHON) -m venv $(PROTOC)
	@$(PROTOC)/bin/python -m pip install -qq --disable-pip-version-check grpcio-tools==1.78.0
	@$(PROTOC)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		$$(find protocol/grpc -name '*.proto' -printf 'penstock/protocol/grpc/%P ')

chaos: setup ## kill processes for a long time
	@$(BIN)/python -m pytest -m chaos --timeout 36000 $(ARGS)

# Pages of docs/ as a site, in build/docs/site. It is strict: a link that leads nowhere is a fault.
SITE := build/docs
docs: setup ## build the documentation as a site, and check it
	@$(BIN)/python docs/site/prepare_site.py $(SITE)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file $(SITE)/mkdocs.yml
	@$(BIN)/python docs/site/check_site.py $(SITE)

lint: setup ## look for faults with ruff
	@$(BIN)/ruff check --quiet .

format: setup ## format everything
	@$(BIN)/ruff format --quiet .

format-check: setup ## is everything formatted?
	@$(BIN)/ruff format --quiet --check .

types: setup ## check the types strictly
	@$(BIN)/mypy --no-error-summary

imports: setup ## does every service import only what it may?
	@$(BIN)/python -m pytest tests/test_import_rules.py

# It also compiles what `make test` imports next, which would do so in each of its processes.
collect: setup ## can the tests of the long runs be imported?
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m 'slow or gpu or chaos' --collect-only -qq

check: lint format-check types imports docs collect test ## all that CI checks

clean: ## remove the environment and everything that was made
	@rm -rf $(VENV) build dist $(NODE_CASES)/node_modules $(AGENT_CASES)/node_modules *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
