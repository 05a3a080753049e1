# The commands of this repository. `make` alone lists them.
#
# PYTHON=python3.12  interpreter for the environment   VENV=.venv  where it is
# PORT=8000          port of the proxy                 MODEL=smollm2  or tiny, or a model folder
# ARGS="..."         more arguments for pytest, the benchmark or the soak

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODEL ?= smollm2
ARGS ?=

BIN := $(VENV)/bin
INSTALL := requirements/install.sh

.DEFAULT_GOAL := help
.PHONY: help up down status chat env env-fast tools test test-fast lint bench bench-reuse bench-routes bench-fleet \
	bench-lookup bench-relay bench-metrics bench-retention differential features soak chaos wedge audit clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: env ## Install what is missing and run the stack on PORT until Ctrl-C
	@exec $(BIN)/kvloop up --port $(PORT) --model $(MODEL)

down: | $(BIN)/kvloop ## Stop a stack (kvloop up --detach)
	@exec $(BIN)/kvloop down

status: | $(BIN)/kvloop ## Show the parts of the stack
	@exec $(BIN)/kvloop status

chat: | $(BIN)/kvloop ## Talk to the running stack
	@exec $(BIN)/kvloop chat --url http://127.0.0.1:$(PORT)

env: ## Create the environment: proxy, tests, vLLM for CPU, NIXL, chat model
	@bash $(INSTALL) full "$(PYTHON)" "$(VENV)"

env-fast: ## Create the environment without vLLM: enough for test-fast and lint
	@bash $(INSTALL) fast "$(PYTHON)" "$(VENV)"

tools: env-fast ## Fetch Prometheus and a headless Chromium for the system tests (Debian, Ubuntu)
	@bash requirements/tools.sh "$(VENV)"

test: env tools ## Run the whole suite, real vLLM workers included (minutes)
	@exec $(BIN)/python -m pytest -m "not soak" $(ARGS)

test-fast: env-fast ## Run what needs no vLLM, without the slow ones (under a minute on two cores)
	@exec $(BIN)/python -m pytest -m "not real and not system and not soak and not slow" -n auto --maxprocesses 4 $(ARGS)

lint: env-fast ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# One gibibyte of KV a worker, so that four of them fit; turns come quicker than people type.
BENCH := $(BIN)/kvloop bench run --local --models-dir .kvloop/models --lease 60 --pause-scale 0.2 \
	--set env.VLLM_CPU_KVCACHE_SPACE=1

bench: env ## Measure all legs on a CPU pair, favourable and not; writes bench-report/ (over an hour)
	$(BENCH) --title "published experiment, scaled down" --out bench-report/lengths \
		--legs published --workloads lengths --lengths 400,800,1600 --conversations 6 $(ARGS)
	$(BENCH) --title "beside prefill's own cache" --out bench-report/production --scale 0.15 \
		--legs production,decode-local,single --workloads agent,chat,coding,branches --conversations 6 $(ARGS)
	$(BENCH) --title "prefill's cache too small" --out bench-report/evicted --scale 0.15 \
		--legs production,single --workloads agent,reasoning --conversations 6 --clients 6 --lease 240 \
		--set max-model-len=2048 --prefill-set num-gpu-blocks-override=80 $(ARGS)
	$(BENCH) --title "where reuse may not win" --out bench-report/unfavourable --scale 0.15 \
		--legs published,noise,production --workloads one-shot,late,burst --conversations 12 $(ARGS)
	$(BIN)/kvloop bench report bench-report/*/run.json --out bench-report --title "kvloop on a CPU pair"

bench-reuse: env ## Measure TTFT of a conversation's fifth turn with reuse and cold (minutes)
	@exec $(BIN)/python -m tests.bench.reuse $(ARGS)

bench-routes: env ## Measure each route of a turn, and what the planner picks, on a real pair
	@exec $(BIN)/python -m tests.bench.routes $(ARGS)

bench-fleet: env-fast ## Spread, stickiness and workers that come and go: 4P4D of fake workers
	@exec $(BIN)/python -m tests.bench.fleet $(ARGS)

bench-lookup: env-fast ## Measure session lookups against history length and table size
	@exec $(BIN)/python -m tests.bench.lookup $(ARGS)

bench-relay: env-fast ## Measure requests/s, added TTFT and CPU beside vllm-router (minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/bench.txt
	@exec $(BIN)/python -m tests.bench.relay $(ARGS)

bench-metrics: env-fast ## Measure what metrics, log and the live page's memory cost a turn
	@exec $(BIN)/python -m tests.bench.metrics $(ARGS)

bench-retention: env-fast ## Compare retention policies on synthetic traces
	@exec $(BIN)/python -m tests.bench.retention $(ARGS)

differential: env ## Compare over 200 generated conversations with a cold worker (minutes)
	@exec env DIFFERENTIAL_REPORT=docs/differential.md $(BIN)/python -m pytest tests/real/test_differential.py -m soak -s $(ARGS)

features: env ## Compare every feature of every route with a plain worker; write the table (minutes)
	@exec env FEATURES_REPORT=docs/compatibility.md FEATURES_README=README.md $(BIN)/python -m pytest tests/real/features -s -m soak $(ARGS)

soak: env ## Soak the stack: 500 turns, then a verdict (minutes)
	@exec $(BIN)/python -m tests.soak $(ARGS)

chaos: env ## Kill, hang and restart every part under load, then a verdict (half an hour)
	@exec $(BIN)/python -m tests.chaos --report docs/chaos.md $(ARGS)

wedge: env ## 500 one-shot requests on a decode worker of 24 blocks (minutes)
	@exec $(BIN)/python -m tests.chaos wedge $(ARGS)

audit: ## Look the pinned dependencies up in a vulnerability database (needs the network)
	@exec bash requirements/audit.sh "$(PYTHON)" "$(VENV)/audit" $(ARGS)

clean: ## Stop the stack; remove the environment, built models, logs and caches
	@if [ -x $(BIN)/kvloop ]; then $(BIN)/kvloop down; fi
	rm -rf "$(VENV)" .kvloop build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/kvloop:
	@echo "There is no environment in $(VENV) yet: run 'make up' or 'make env' first." >&2; exit 1
