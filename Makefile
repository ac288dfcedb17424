# Two commands for a fresh machine with Python >= 3.11 and make:
#   make quickstart   install, sweep the bundled engine, recommend, write a report
#   make test         install what the checks need and run all of them
# and a third for the documents as a site, build/site/index.html:
#   make docs
# A smaller torch (no CUDA): make quickstart PIP_ARGS="--extra-index-url <the CPU wheel index>",
# see README.md.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
# without compiling: most modules of torch and transformers are never imported
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt $(PIP_ARGS)
QUICKSTART := runs/quickstart
# The tests share the cores, so each process computes with one thread. Three processes keep two cores
# busy, since many tests wait for a clock.
PYTEST_WORKERS ?= 3

.PHONY: quickstart test lint docs accuracy features posts fuzz sanitize audit gpu-hour clean

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lmi-bench needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.engine: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing lmi-bench with its engine into $(VENV) (torch is the large part) ..."
	$(PIP) -e ".[engine]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing lmi-bench and what its checks need into $(VENV) ..."
	$(PIP) -e ".[engine,parquet,dev]"
	@touch $@ $(VENV)/.engine

# What the quickstart does is what a user types; a second call goes on where the first one ended.
quickstart: $(VENV)/.engine
	$(BIN)/lmi-bench sweep scenarios/quickstart.yaml --out $(QUICKSTART)/sweep --resume
	$(BIN)/lmi-bench recommend $(QUICKSTART)/sweep --json $(QUICKSTART)/local.json
	@echo
	$(BIN)/lmi-bench recommend --model qwen3-8b --input-tokens 256 --output-tokens 256 \
		--rate 2 --slo "latency_per_token_p90<=60ms" --json $(QUICKSTART)/gpu.json | sed '/^$$/,$$d'
	@echo
	$(BIN)/lmi-bench report $(QUICKSTART)/sweep --recommendation $(QUICKSTART)/local.json \
		--recommendation $(QUICKSTART)/gpu.json -o $(QUICKSTART)/report.html

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --no-warn-unreachable --cache-dir .mypy_cache/darwin -p lmi_bench
	$(BIN)/lint-imports --no-cache

# The checks of the text run beside the first tests, which wait for no clock. Python writes bytecode
# even where the shell forbids it: else each program that a test starts compiles all its imports.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory lint & lint=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS); tests=$$?; \
	wait $$lint && exit $$tests

# The command line's page is made from the program, so lmi-bench itself is installed too.
$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[docs]"
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server -d build/site"

# Fails where predictions of published tables are worse than docs/accuracy.md; ten minutes of one core.
accuracy: $(VENV)/.dev
	$(BIN)/python benchmarks/planner_accuracy.py --check

# Every row of docs/features.md by a command, from a clean checkout of HEAD; under half an hour.
features: $(VENV)/.dev
	$(BIN)/python benchmarks/features.py

# Fails where docs/posts.md is not what the program gives; a quarter of an hour at most.
posts: $(VENV)/.dev
	$(BIN)/python benchmarks/posts.py --check

# 100,000 damaged files, and 20,000 hostile requests to `serve`; a failure names its seed.
# Its seeds begin with the time; SEED=N repeats those of a failure.
fuzz: $(VENV)/.dev
	LMI_BENCH_FUZZ=$${FUZZ:-100000} LMI_BENCH_FUZZ_SEED=$${SEED:-$$(date +%s)} OMP_NUM_THREADS=1 \
		PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) tests/fuzz

# The receiver, the planner's queue and the engine's step in C and C++ under gcc's address, undefined and thread sanitizers.
sanitize: $(VENV)/.dev
	$(BIN)/python benchmarks/sanitize.py

# The pinned versions against the published advisories, by pip-audit in an environment of its own; needs the
# network, and fails where a package cannot be looked up.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	build/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

# On a machine with a GPU: tests, speeds, and tokens of every family; cut, it goes on behind what it has.
# PYTHON=python3 uses an environment that has torch with CUDA; LIMIT_S=540 fits a shorter slot.
gpu-hour:
	TRITON_INTERPRET=0 PYTHONPATH=. $${PYTHON:-$(BIN)/python} benchmarks/gpu_hour.py --limit-s $${LIMIT_S:-3000}

clean:
	rm -rf $(VENV) dist build
