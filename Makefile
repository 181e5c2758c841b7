# `make demo` or `make test` on a fresh machine: creates .venv, installs the package, runs it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# What shows first that a version of JAX, Flax or Optax does not work: two minutes of one core.
CORE := tests/test_paths.py tests/test_front_ends.py tests/test_train_state.py \
	tests/capture/test_call.py tests/capture/test_nnx.py \
	tests/optimizers/test_family.py tests/optimizers/test_natural_gradient.py

.PHONY: demo bench test test-all test-versions test-oldest test-newest outside docs coverage lint \
	format release clean

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

demo: $(READY)  ## six optimizers on handwritten digits: a table and a figure in two minutes
	$(BIN)/kldwrm demo

bench: $(READY)  ## step time relative to Adam
	$(BIN)/kldwrm bench

test: $(READY)  ## the default tests, on two workers
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not outside"

test-all: $(READY)  ## the slow tests too
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-versions: test-oldest test-newest  ## the core tests on the oldest and the newest dependencies

OLDEST := .venv-oldest/.ready
NEWEST := .venv-newest/.ready

# Every lower bound of the package's dependencies, as a version: "jax>=0.8.2" becomes "jax==0.8.2".
$(OLDEST): pyproject.toml
	$(PYTHON) -m venv --clear .venv-oldest
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*(bound.replace(">=", "==") for bound in project["dependencies"]), sep="\n")' \
		> .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --editable ".[test]" \
		--constraint .venv-oldest/constraints.txt
	touch $@

$(NEWEST): pyproject.toml
	$(PYTHON) -m venv --clear .venv-newest
	touch $@

test-oldest: $(OLDEST)
	.ci/core .venv-oldest $(CORE)

test-newest: $(NEWEST)  # what is newest changes without us, so it is asked for every time
	.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager \
		--editable ".[test]"
	.ci/core .venv-newest $(CORE)

outside: $(READY)  ## wheel and sdist in empty environments, notebooks in their fast mode, runs killed hard
	$(BIN)/python -m pytest -n 2 --dist worksteal -m outside tests

docs: $(READY)  ## the documentation, in docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

coverage: $(READY)  ## lines of the package that the default tests run; fails below 95 %
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not outside" \
		--cov=kldwrm_jax --cov-report=term-missing:skip-covered --cov-fail-under=95

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

release: $(READY)  ## wheel and sdist in dist/, checked, and tried in empty environments
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	KLDWRM_DIST=dist $(BIN)/python -m pytest -m outside tests/test_package.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-oldest .venv-newest .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist docs/_build
