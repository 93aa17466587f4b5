# make demo   set up if needed, pack a small real data set, show the result
# make test   set up if needed, all checks and all tests
# make lint   checks only          make docs   the pages, into site/          make bench   benchmarks
# make test-trainers   the tests of Lightning, Fabric and DeepSpeed, in an environment of their own
PYTHON ?= python3
VENV ?= .venv
TRAINERS_VENV ?= .venv-trainers
BIN := $(VENV)/bin
DEMO_OUT ?= demo-out

export HF_HUB_OFFLINE = 1

.PHONY: demo test test-trainers lint docs unit bench setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	rm -rf $(DEMO_OUT)
	$(BIN)/energon-packed demo --output-dir $(DEMO_OUT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python tools/make_option_tables.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: setup
	$(BIN)/python -m pytest -n 2

test: lint docs unit

$(TRAINERS_VENV)/.installed: pyproject.toml constraints.txt tests/trainers/requirements.txt
	test -x $(TRAINERS_VENV)/bin/python || $(PYTHON) -m venv $(TRAINERS_VENV)
	$(TRAINERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(TRAINERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(TRAINERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/trainers/requirements.txt
	touch $@

test-trainers: $(TRAINERS_VENV)/.installed
	$(TRAINERS_VENV)/bin/python -m pytest tests/trainers

bench: setup
	for script in tools/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) $(TRAINERS_VENV) $(DEMO_OUT) site
