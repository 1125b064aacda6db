# make demo   sets up .venv and runs the main job
# make test   sets up .venv and passes the checks and tests
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow format clean

demo: .venv/.installed
	$(BIN)/python examples/quickstart.py

test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow"

test-slow: .venv/.installed
	$(BIN)/pytest -m slow

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
