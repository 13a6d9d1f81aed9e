# Everything a person needs: make demo, make serve, make test. VENV may point elsewhere.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PROTOS := $(wildcard proto/twophase/v1/*.proto)
PACKAGES := core engine kv_transfer kv_link prefill_worker decode_worker router deploy bench proto/twophase

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-thorough check docs proto format model parity clean \
	compare fuzz chaos bench-engine bench-cancel bench-frontdoor bench-interference bench-recovery \
	bench-scaling bench-simulate bench-simulate-reality bench-telemetry bench-transfer

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "twophase needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

model: $(STAMP)  ## Fetch the default model
	@$(BIN)/twophase model fetch smollm2-135m-instruct

demo: $(STAMP)  ## Install, fetch the model, start a small cluster, ask one question, stop
	@$(BIN)/twophase demo

serve: $(STAMP)  ## The same, but stay up (gRPC on 127.0.0.1:8100, HTTP on 8000) until Ctrl-C
	@$(BIN)/twophase serve

test: $(DEV)  ## Run the whole test suite
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

test-thorough: $(DEV)  ## The same with all reference prompts, rounds and pairs of set-ups
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --thorough

check: $(DEV)  ## Format, lint, types, layers, generated code, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports
	$(BIN)/python -m tests.check_generated
	$(BIN)/python -m tests.sizes

format: $(DEV)  ## Put the code into the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(DEV)  ## Generate the message modules from proto/twophase/v1/*.proto
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto \
		--grpc_python_out=proto $(PROTOS)

docs: $(DEV)  ## Write docs/metrics.md from the metric table, and the Grafana board
	$(BIN)/python -m tests.metrics_page
	$(BIN)/python -m deploy.grafana

parity: $(DEV)  ## Compare every mode and transport with a file of reference tokens
	$(BIN)/python -m bench.parity $(REFERENCE)

bench-engine: $(DEV)  ## One core: prefill and decode beside transformers and the machine's limit
	$(BIN)/python -m bench.engine

fuzz: $(DEV)  ## 5,000 random gRPC messages and as many HTTP requests, beside running streams
	$(BIN)/python -m pytest tests/fuzz -q -s --timeout 3000 --num-fuzz-requests 5000

chaos: $(STAMP)  ## Ten minutes of streams while their workers are killed and paused
	@$(BIN)/twophase chaos deploy/examples/chaos.yaml chaos.duration_s=600

bench-frontdoor: $(DEV)  ## What one core of router sustains and adds; engines answer at once
	$(BIN)/python -m bench.frontdoor

compare: $(STAMP)  ## Colocated, chunked and disaggregated on two workloads; writes docs/comparison (9 min)
	@$(BIN)/twophase compare docs/comparison/plan.yaml --out docs/comparison

bench-cancel: $(DEV)  ## How soon both phases stop when a client goes away
	$(BIN)/python -m bench.frontdoor.cancel

bench-interference: $(DEV)  ## What a long prompt does to running streams, in each mode
	$(BIN)/python -m bench.interference

bench-recovery: $(DEV)  ## How long streams stand still when their decode worker is killed, or stopped
	$(BIN)/python -m bench.recovery
	$(BIN)/python -m bench.drain

bench-scaling: $(DEV)  ## Real pools under a load that turns from long prompts to long answers
	$(BIN)/python -m bench.scaling --figure docs/figures/scaling.png

bench-simulate: $(DEV)  ## The autoscaler beside others on a manual clock; TRACES="files" adds traces
	$(BIN)/python -m bench.simulate $(TRACES)

bench-simulate-reality: $(DEV)  ## The simulator beside a real cluster of one worker in each pool
	$(BIN)/python -m bench.simulate.reality

bench-telemetry: $(DEV)  ## What histories, timelines, metrics and scrapes cost decode: on against off
	$(BIN)/python -m bench.telemetry

bench-transfer: $(DEV)  ## Each KV transport beside a plain copy of the same bytes
	$(BIN)/python -m bench.transfer

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
