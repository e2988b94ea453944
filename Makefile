# The one door to building, testing and measuring Awa. "make help" lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PG_CONFIG ?= pg_config
VERSION ?= 18
BIN := .venv/bin

EXTVERSION := $(shell sed -n "s/^default_version = '\(.*\)'/\1/p" extension/awa.control)
SCRIPT := build/awa--$(EXTVERSION).sql
# The one to this version is made from its sources, those between earlier versions are as they were released.
UPGRADES := $(patsubst sql/upgrades/%,build/awa--%,$(wildcard sql/upgrades/*--*.sql)) \
	$(patsubst extension/released/%,build/%,$(wildcard extension/released/awa--*--*.sql))
PACKAGED := $(patsubst build/%,python/src/awa/_sql/%,$(SCRIPT) $(UPGRADES))
PGTLE := $(patsubst build/awa--%,build/pgtle-awa-%,$(SCRIPT) $(UPGRADES))
SOURCES := $(shell find sql -name '*.sql' 2>/dev/null)

.PHONY: help all build install dist wheel setup lock check secrets audit api-manifest test test-one test-long \
	test-matrix correctness mutation coverage demo bench bench-peers bench-plots clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---- build

all: build
build: $(SCRIPT) $(UPGRADES) $(PACKAGED) $(PGTLE) ## from sql/, the scripts that install and upgrade, also for pg_tle

# Scripts of another version go, so whatever is beside the install script comes after it.
$(SCRIPT): $(SOURCES) extension/awa.control extension/tools/inline_includes.awk
	@mkdir -p build python/src/awa/_sql
	@rm -f build/awa--*.sql build/pgtle-awa-*.sql python/src/awa/_sql/*.sql
	@awk -f extension/tools/inline_includes.awk sql/awa.sql > $@

build/awa--%.sql: sql/upgrades/%.sql $(SCRIPT)
	@awk -f extension/tools/inline_includes.awk $< > $@

build/awa--%.sql: extension/released/awa--%.sql $(SCRIPT)
	@cp $< $@

$(PACKAGED): python/src/awa/_sql/%: build/%
	@mkdir -p $(@D)
	@cp $< $@

$(PGTLE): build/pgtle-awa-%: build/awa--% extension/awa.control extension/tools/wrap_pgtle.awk
	@awk -f extension/tools/wrap_pgtle.awk extension/awa.control $< > $@

install: build ## install the extension into a server by PGXS (PG_CONFIG=path/to/pg_config)
	@$(MAKE) --no-print-directory -C extension install PG_CONFIG=$(PG_CONFIG)

dist: build ## a PGXN archive of the last commit
	@mkdir -p dist
	@sed 's/@VERSION@/$(EXTVERSION)/' extension/META.json.in > build/META.json
	@git archive --format=zip --prefix=awa-$(EXTVERSION)/ --add-file=build/META.json \
		-o dist/awa-$(EXTVERSION).zip HEAD

WHEELS ?= dist
wheel: build setup ## the Python package as a wheel, install script included (WHEELS=folder)
	@mkdir -p $(WHEELS)
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation \
		--wheel-dir $(WHEELS) ./python

# ---- environment

setup: .venv/ready ## the virtual environment, with the package editable and pinned tools

.venv/ready: tools/requirements.txt python/pyproject.toml
	@echo "setting up .venv" >&2
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet -r tools/requirements.txt
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -e python
	@touch $@

lock: build ## pin the newest tools that fit (rewrites tools/requirements.txt)
	@rm -rf build/lock
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip --disable-pip-version-check install --quiet hatchling editables \
		-e 'python[demo,dev]'
	@build/lock/bin/python -m pip --disable-pip-version-check freeze --exclude-editable \
		> tools/requirements.txt

# ---- checks and tests

check: build setup ## static checks: format, lint, types, planes, file shapes
	@$(BIN)/python -m tools.run_tests --static

# Left out: keys that are published as test vectors, checksums of released files, and passwords of servers on the reader's
# own machine.
secrets: setup ## look for passwords and keys in the files that git knows
	@git ls-files -z | xargs -0 $(BIN)/detect-secrets-hook --no-verify --exclude-files '^docs/vectors/' \
		--exclude-lines '@127\.0\.0\.1\b|"awa--[0-9.-]+\.sql": "'

build/audit/ready: tools/audit-requirements.txt
	@rm -rf build/audit
	@$(PYTHON) -m venv build/audit
	@build/audit/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

audit: build/audit/ready ## look for known vulnerabilities of the pinned packages (asks the database of pypi.org)
	@build/audit/bin/pip-audit --strict --no-deps --disable-pip -r tools/requirements.txt -r tools/audit-requirements.txt

api-manifest: build setup ## docs/api-manifest.json as the sources have it, after a change of the public surface that is meant
	@$(BIN)/python -m tools.api_manifest

test: build setup ## everything, on PostgreSQL 15 and 18 side by side
	@$(BIN)/python -m tools.run_tests 15 18

test-one: build setup ## SQL and Python tests on one version (VERSION=15|16|17|18, K=expression)
	@$(BIN)/python -m tools.run_tests --no-static $(if $(K),-k '$(K)') $(VERSION)

test-long: build setup ## the longer forms of the tests as well, on 15 and 18, or a part of the long forms (PART=cases|crashes|races|orders|inputs|models|others)
	@$(BIN)/python -m tools.run_tests $(if $(PART),--no-static --part $(PART),--long) 15 18

test-matrix: build setup ## everything, on every supported PostgreSQL, two at a time
	@$(BIN)/python -m tools.run_tests 15 16 17 18

PART ?=
correctness: build setup ## what is checked by machine beyond tests: models, states, orders, histories, plans, coverage (PART=name)
	@$(BIN)/python -m correctness.run $(if $(PART),--only '$(PART)')

MUTATION_ARGS ?=
mutation: build setup ## break the SQL in a hundred ways and see whether tests notice; goes on where it stopped (MUTATION_ARGS=--limit=10)
	@$(BIN)/python -m correctness.mutate $(MUTATION_ARGS)

ONLY ?=
coverage: build setup ## which lines the pgTAP files and the tests of the package run (ONLY=sql|python)
	@$(BIN)/python -m correctness.line_coverage $(if $(ONLY),--only $(ONLY))

# ---- demo and benchmarks: set-up talks on stderr, so that stdout holds results alone

demo: ## checksum a directory tree through the queue on an embedded PostgreSQL (DEMO_ARGS=DIRECTORY)
	@$(MAKE) --no-print-directory -s build setup >&2
	@$(BIN)/python examples/demo/run.py $(DEMO_ARGS)

SCENARIO ?= drain
bench: bench-$(SCENARIO) ## a benchmark: a table on stderr, a JSON object per figure on stdout (SCENARIO=... BENCH_ARGS=...)

bench-peers: ## the other job queues that benchmarks compare with, into build/bench
	@$(MAKE) --no-print-directory -s build setup >&2
	@$(BIN)/python -m bench.peers.install

build/bench/plots/ready: bench/plots/requirements.txt
	@rm -rf build/bench/plots
	@$(PYTHON) -m venv build/bench/plots
	@build/bench/plots/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

bench-plots: build/bench/plots/ready ## docs/benchmarks.md and its charts, from bench/results/*.jsonl
	@build/bench/plots/bin/python -m bench.plots.page $(BENCH_ARGS)

bench-%: ## the same by name: wal drain insert enqueue latency backpressure blake3 producers workers prune deadline pinned poolers soak
	@$(MAKE) --no-print-directory -s build setup >&2
	@$(BIN)/python -m bench.$* $(BENCH_ARGS)

clean: ## remove all that make made, server trees included
	@$(PYTHON) tools/servers.py clean
	@rm -rf .venv build dist python/dist python/src/awa/_sql/*.sql
