# make demo   sets up .venv and compares six methods, ending in a table and a report
# make test   sets up .venv and passes the checks and tests
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow format clean

demo: .venv/.demo
	$(BIN)/moonopt compare multidigits --methods moon,muon,nash-mtl,mgda,famo,ls --seeds 2 --jobs 2 --out runs/demo --report runs/demo/report

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

.venv/.demo: EXTRA := bench
.venv/.installed: EXTRA := dev
.venv/.demo .venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRA)]"
	touch $@
