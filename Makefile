# Two commands do all the set-up: `make demo` and `make test`. Everything made stays in .venv.
# Paths are relative throughout, so a checkout may lie in a directory with a space in its name.

.DEFAULT_GOAL := help
.PHONY: help venv demo docs test tests test-rest test-peers test-torch test-gpu test-long test-all chaos faults lint format clean
MAKEFLAGS += --no-builtin-rules --no-print-directory
export PYTHON
# Tests start thousands of processes, each of which would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

PY := .venv/bin/python
CODE := $(wildcard src tests examples benchmarks scripts)
# Many tests wait for their own processes: three files at a time keep two cores busy.
IN_PARALLEL := -n 3 --dist loadfile

help: ## list these targets
	@echo 'make [PYTHON=/path/to/python3.11] TARGET'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

venv: ## make .venv or bring it up to date
	@scripts/make-venv

demo: venv ## train with 1 and 3 processes, kill, resume, compare
	@$(PY) examples/demo.py

docs: venv ## build the guide and the reference into build/docs; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

lint: venv ## ruff, mypy and the words of the documentation
	@$(PY) -m ruff check $(CODE) docs/migration/scripts
	@$(PY) -m ruff format --check $(CODE) docs/migration/scripts
	@$(PY) -m mypy $(CODE)
	@$(PY) scripts/check_language.py

test: venv ## lint, and at the same time the tests that need neither root nor system packages
	@$(MAKE) -j2 lint tests

tests: venv
	@$(PY) -m pytest $(IN_PARALLEL) -m 'not system and not full and not realtime and not long and not gpu and not peers'

test-rest: venv ## what CI runs besides: system packages, more of long tables, then the real clock
	@$(PY) -m pytest $(IN_PARALLEL) -m '(system or full) and not realtime and not long and not gpu and not peers'
	@$(PY) -m pytest -n 0 -m 'realtime and not long and not gpu and not peers'

test-peers: ## tests with Accelerate, Lightning and others, in an environment each
	@scripts/test-peers

test-torch: ## a small part with the oldest torch promised and with the newest
	@scripts/test-with-torch oldest
	@scripts/test-with-torch newest

test-long: venv ## all the rest of long tables, which takes longest
	@$(PY) -m pytest $(IN_PARALLEL) -m 'long and not realtime and not gpu and not peers'
	@$(PY) -m pytest -n 0 -m 'long and realtime and not gpu and not peers'

test-gpu: $(if $(WHEELS),,venv) ## GPU tests and benchmarks in MINUTES=30, into build/gpu; WHEELS=DIR without a network
	@$(if $(WHEELS),$(or $(PYTHON),python3) scripts/gpu_wheels.py install "$(WHEELS)")
	@$(if $(WHEELS),build/venv/bin/python,$(PY)) scripts/gpu_suite.py build/gpu --minutes $(or $(MINUTES),30)

chaos: venv ## 1,000 kills over six parallelism strategies, some hours, into build/chaos.jsonl
	@$(PY) benchmarks/chaos.py --kills 1000

faults: venv ## plant 60 faults and count those that tests catch, hours, into build/faults.json
	@mkdir -p build
	@$(PY) scripts/plant_faults.py --json build/faults.json

test-all: test ## everything but test-gpu
	@$(MAKE) test-rest
	@$(MAKE) test-long

format: venv ## let ruff rewrite the code
	@$(PY) -m ruff check --fix $(CODE) docs/migration/scripts
	@$(PY) -m ruff format $(CODE) docs/migration/scripts

clean: ## remove .venv, caches and builds; run directories stay
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis .coverage dist build
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +
