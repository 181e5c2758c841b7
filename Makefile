# `make demo` or `make test` on a fresh machine: creates .venv, installs the package, runs it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo bench test test-all outside docs coverage lint format clean

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

outside: $(READY)  ## the wheel in an empty environment, notebooks in their fast mode, runs killed hard
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

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist docs/_build
