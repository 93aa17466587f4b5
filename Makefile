# make demo   set up if needed, pack a small real data set, show the result
# make test   set up if needed, all checks and all tests
# make lint   checks only          make docs   the pages, into site/          make bench   benchmarks
# make test-trainers   every trainer in an environment of its own; test-trainers-NAME: one folder of tests/trainers
# make test-lowest   all tests with the oldest versions that pyproject.toml allows, in an environment of their own
# make test-newest   all tests with the newest versions, on the newest Python, in an environment of their own
# make chromium   install the browser that the tests need, as root on Debian; `make test` does it too
# make hard     the tests that have a long form, in that form: hours
# make coverage   all tests with line coverage of every process; fails below the limit in pyproject.toml
# make mutants   changes of the core modules that no test notices, MUTANTS names some modules; fails if there are too many
PYTHON ?= python3
VENV ?= .venv
TRAINERS_VENV ?= .venv-trainers
LOWEST_VENV ?= .venv-lowest
NEWEST_VENV ?= .venv-newest
# The newest Python of pyproject.toml that runs here; those of pyenv are not on the path.
NEWEST_PYTHON ?= $(shell for minor in 13 12 11; do for python in python3.$$minor $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$$minor.*/bin/python3; do \
  $$python -c '' 2> /dev/null && echo $$python && exit; done; done)
BIN := $(VENV)/bin
TRAINERS := $(patsubst tests/trainers/%/run.py,%,$(wildcard tests/trainers/*/run.py))
OTHER_TRAINERS := $(patsubst tests/trainers/%/requirements.txt,%,$(wildcard tests/trainers/*/requirements.txt))
DEMO_OUT ?= demo-out
TESTS ?= tests
MUTANTS ?=
MUTANTS_JOBS ?= 1

# What the long form of each test counts; tests/test_make.py compares the names with those that the tests read.
HARD := ENERGON_PACKED_FUZZ=20000 ENERGON_PACKED_DAMAGES=200 ENERGON_PACKED_KILLS=40 ENERGON_PACKED_FAULTS=500 ENERGON_PACKED_SOAK=200 ENERGON_PACKED_COMBINATIONS=1000 ENERGON_PACKED_MEDIA_CHANGES=300 ENERGON_PACKED_LOG_DAMAGES=50 ENERGON_PACKED_MODELS=1000 ENERGON_PACKED_VIDEOS=540 ENERGON_PACKED_FAMILIES=200
HARD_TESTS ?= $(shell grep -rlE --include='test_*.py' '"ENERGON_PACKED_(FUZZ|DAMAGES|KILLS|FAULTS|SOAK|COMBINATIONS|MEDIA_CHANGES|LOG_DAMAGES|MODELS|VIDEOS|FAMILIES)"' tests)

export HF_HUB_OFFLINE = 1
# Images of containers often set it; without compiled modules every process of a test compiles the package again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: chromium demo test test-trainers $(TRAINERS:%=test-trainers-%) test-lowest test-newest hard coverage mutants lint tables docs unit bench setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt tools/requirements-families.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --upgrade --target $(VENV)/torchvision -r tools/requirements-families.txt
	rm -f $(VENV)/torchvision/torchaudio/lib/*.so  # for CUDA; processors call its Python part
	touch $@

demo: setup
	rm -rf $(DEMO_OUT)
	$(BIN)/energon-packed demo --output-dir $(DEMO_OUT) --records 160

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/make_keywords.py --check
	$(BIN)/mypy
	$(BIN)/lint-imports

tables: setup
	$(BIN)/python tools/make_option_tables.py --check
	$(BIN)/python tools/make_tables.py --check
	$(BIN)/python tools/make_diagrams.py --check

docs: tables
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# In a new environment one process compiles the packages, not each test process the same modules at the same time.
unit: setup chromium
	$(BIN)/python -c 'import tests.preloaded'
	$(BIN)/python -m pytest -n 3 --durations 40

# Tests open pages in this browser, and fail without it. Root on Debian gets it here.
chromium:
	@{ command -v chromium || command -v google-chrome || command -v chromium-browser; } > /dev/null || \
	  test "$$(id -u)" != 0 || timeout 600 sh -c 'apt-get update && apt-get install --yes --no-install-recommends chromium' > /dev/null 2>&1 || \
	  echo "apt-get cannot install Chromium; its tests fail"

# Checks run beside the tests, which build the site; Chromium is installed beside the set-up.
test:
	$(MAKE) -j 3 lint tables unit

# Trainers without requirements.txt run in the development environment.
$(TRAINERS_VENV)/%/.installed: pyproject.toml constraints.txt tests/trainers/%/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -r tests/trainers/$*/requirements.txt
	test ! -e tests/trainers/$*/requirements-no-deps.txt || \
	  $(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps -r tests/trainers/$*/requirements-no-deps.txt
	touch $@

$(TRAINERS:%=test-trainers-%): export ENERGON_PACKED_WRITE_RESULTS = 1
$(OTHER_TRAINERS:%=test-trainers-%): test-trainers-%: $(TRAINERS_VENV)/%/.installed
	$(TRAINERS_VENV)/$*/bin/python -m pytest tests/trainers/$*

$(filter-out $(OTHER_TRAINERS:%=test-trainers-%),$(TRAINERS:%=test-trainers-%)): test-trainers-%: setup
	$(BIN)/python -m pytest tests/trainers/$*

test-trainers: $(TRAINERS:%=test-trainers-%)

# trl requires newer versions than these; the tests read the chat templates in it.
$(LOWEST_VENV)/.installed: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST_VENV)/bin/python || $(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints-lowest.txt torch
	$(LOWEST_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints-lowest.txt \
	  -e '.[megatron,ray,report,s3,transformers-train,video]' hatchling hypothesis import-linter 'moto[server]' mutmut pytest pytest-timeout pytest-xdist torchdata
	$(LOWEST_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps -c constraints.txt trl
	touch $@

test-lowest: $(LOWEST_VENV)/.installed chromium
	$(LOWEST_VENV)/bin/python -m pytest -n 2 $(TESTS)

# Without constraints: what `pip install energon-packed` brings today.
$(NEWEST_VENV)/.installed: pyproject.toml
	test -x $(NEWEST_VENV)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'
	touch $@

test-newest: $(NEWEST_VENV)/.installed chromium
	$(NEWEST_VENV)/bin/python -m pytest -n 2 $(TESTS)

hard: setup
	$(HARD) $(BIN)/python -m pytest -n 2 $(HARD_TESTS)

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
coverage: setup chromium
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2 $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

mutants: setup
	nice $(BIN)/python tools/mutants.py --jobs $(MUTANTS_JOBS) $(MUTANTS)

bench: setup
	for script in tools/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) $(TRAINERS_VENV) $(LOWEST_VENV) $(NEWEST_VENV) $(DEMO_OUT) site .coverage .coverage.*
