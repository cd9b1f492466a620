# The README's two commands are `make demo` and `make test`; `make check` is all that CI checks.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Processes that the tests are spread over: one more than the two cores of CI, since a quarter of a test's time is waiting.
JOBS ?= 3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Each stamp says that an extra is installed as pyproject.toml now asks for it; `dev` includes `tools`.
TOOLS := $(VENV)/.arenax-tools
DEV := $(VENV)/.arenax-dev

.PHONY: help demo test stress check format format-check lint types coverage wheel-check clean

help:
	@echo "make demo          run the demonstration"
	@echo "make test          run the tests and the doctests     (PYTEST_ARGS=... is passed on)"
	@echo "make check         format, lint, types, tests, coverage, wheel: what CI runs"
	@echo "make format        format and fix what can be fixed"
	@echo "make stress        the property tests, with very many examples and no time limit"
	@echo "make clean         remove what the others made, the environment too"
	@echo "Each takes PYTHON= (now $(PYTHON)) and VENV= (now $(VENV))."

demo: $(TOOLS)
	$(BIN)/arenax demo

# Under coverage always, so that `make coverage` needs no second run. A file goes to one process: what its tests share,
# compiled programs above all, is made once.
test: $(DEV)
	COVERAGE_FILE=$(VENV)/.coverage $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --cov --cov-report= $(PYTEST_ARGS)

stress: $(DEV)
	HYPOTHESIS_PROFILE=stress $(BIN)/python -m pytest tests $(PYTEST_ARGS)

# One after the other, also under `make -j`: `coverage` reports on the run of `test`.
check: $(DEV)
	$(MAKE) format-check
	$(MAKE) lint
	$(MAKE) types
	$(MAKE) test
	$(MAKE) coverage
	$(MAKE) wheel-check

format: $(DEV)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

format-check: $(DEV)
	$(BIN)/ruff format --check .

lint: $(DEV)
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# The branch coverage of `arenax` in the last `make test`.
coverage: $(DEV)
	$(BIN)/coverage report --data-file=$(VENV)/.coverage --fail-under=95

# What a user gets who installs the wheel without extras: three packages, no rich and no matplotlib, a pool that works,
# and a command that says what it lacks. Away from the checkout, which would otherwise be imported.
wheel-check: $(DEV)
	@set -eu; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	fail() { echo "wheel-check: $$*" >&2; exit 1; }; \
	$(BIN)/python -m build --no-isolation --outdir "$$tmp/dist" . >"$$tmp/log" 2>&1 || { cat "$$tmp/log"; exit 1; }; \
	files=$$($(BIN)/python -m zipfile -l "$$tmp"/dist/*.whl | sed -e 1d -e 's/ .*//'); \
	tops=$$(echo "$$files" | sed 's,/.*,,' | grep -v '\.dist-info$$' | sort -u | tr '\n' ' '); \
	[ "$$tops" = "arenax arenax_adapters arenax_stress " ] || fail "the wheel holds $$tops"; \
	for package in $$tops; do \
	    echo "$$files" | grep -qx "$$package/py.typed" || fail "the wheel lacks $$package/py.typed"; \
	done; \
	$(BIN)/python -m venv "$$tmp/venv"; \
	"$$tmp/venv/bin/python" -m pip --disable-pip-version-check install --quiet "$$tmp"/dist/*.whl; \
	cd "$$tmp"; \
	env -u PYTHONPATH venv/bin/python -c "$$USE_WHEEL"; \
	if said=$$(env -u PYTHONPATH venv/bin/arenax demo 2>&1); then fail "arenax demo ran without its extra: $$said"; fi; \
	case $$said in \
	    *'pip install "arenax[tools]"'*) ;; \
	    *) fail "arenax demo does not say what it lacks: $$said" ;; \
	esac; \
	echo "wheel-check: ok ($$(echo "$$files" | wc -l) files)"

define USE_WHEEL
import importlib.util
import numpy as np
import arenax, arenax_adapters, arenax_stress
assert "site-packages" in arenax.__file__, arenax.__file__
extras = [name for name in ("rich", "matplotlib", "hypothesis", "pytest") if importlib.util.find_spec(name)]
assert not extras, extras
with arenax.BufferPool() as pool:
    batch = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(pool.put(batch), batch)
endef
export USE_WHEEL

clean:
	rm -rf .venv .venv-newest build dist htmlcov arenax-demo.png .coverage* .hypothesis .pytest_cache .ruff_cache .benchmarks
	find pool adapters stress tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("arenax needs Python 3.11 or newer; make ... PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(TOOLS): pyproject.toml | $(BIN)/python
	@echo "installing arenax[tools] into $(VENV)"
	$(PIP) --editable ".[tools]"
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@echo "installing arenax[dev] into $(VENV)"
	$(PIP) --editable ".[dev]"
	@touch $(TOOLS) $@
