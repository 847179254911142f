# Everything a developer runs. Each target installs what it needs first, so any of them works in a fresh checkout
# that has python3 (3.11 or later), make and a C compiler (torch.compile uses it).

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS := $(VENV)/.docs
BENCHMARKS := $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)

# A cap on the instructions that oneDNN uses: on some CPUs its AMX kernels for bfloat16 matrix products die with an
# illegal instruction. A CPU without AMX loses nothing by it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint results notebooks docs docs-serve dist bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## make .venv with the pinned versions of constraints.txt

# The stamp is written last: an installation that broke off is taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	@touch $@

# What only the site and the packages need.
$(DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

demo: $(INSTALLED) ## rewire, train with and without shortcuts, prove, and one page about it; minutes
	$(BIN)/unskip demo

test: lint docs ## lint, types, the site, and every test but the full matrices
	$(PYTEST) -m "not full"

# A table is written by the tests of one file, so a file stays with one worker.
test-all: export UNSKIP_WRITE_TABLES = 1
test-all: lint docs dist ## lint, types and all tests, the site and the packages; writes tables into docs
	$(PYTEST) --hypothesis-profile thorough --dist loadfile --cov --cov-report=term

lint: $(INSTALLED) ## style, types, the arrows between the rooms, and what recipes repeat
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pylint src/unskip/recipes

# `--data recorded` names the studies on real images; with --show no image is read.
results: $(INSTALLED) ## tables and figures of README and docs again, from docs/results/*.json
	$(BIN)/python benchmarks/_pages.py
	$(BIN)/python benchmarks/headline.py
	for study in skipless_gap mae dino sit; do \
		$(BIN)/python benchmarks/$$study.py --data recorded --show > /dev/null || exit 1; done
	test ! -e docs/results/sit-cifar-long.json || $(BIN)/python benchmarks/sit_long.py --data recorded --show > /dev/null
	$(BIN)/python benchmarks/skipless_gap.py --stage 2 --data recorded --show --out docs/results/skipless-long.json > /dev/null
	$(BIN)/python benchmarks/conditioning.py --figure docs/img/conditioning.svg
	$(BIN)/python benchmarks/absorb.py --figure
	$(BIN)/python benchmarks/optim.py --figure
	$(BIN)/python benchmarks/growth.py --figure

notebooks: $(DOCS) ## run the notebooks of docs/notebooks again, in place
	PYTHONWARNINGS=ignore $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

docs: $(DOCS) ## the documentation site, in build/site; a broken link or a missing public name stops it
	$(BIN)/mkdocs build --quiet --strict

docs-serve: $(DOCS) ## the site at http://127.0.0.1:8000, built again whenever a page changes
	$(BIN)/mkdocs serve

dist: $(DOCS) ## sdist and wheel in dist/, checked by twine
	rm -rf dist
	$(BIN)/python -m build --no-isolation > /dev/null
	$(BIN)/twine check --strict dist/*

bench: $(INSTALLED) ## run each benchmark
	@$(if $(BENCHMARKS),,echo "There is no benchmark yet: benchmarks/ holds no Python file.")
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python "$$file"; done

clean: ## remove caches and build outputs; .venv and runs stay
	rm -rf build dist .coverage .coverage.* htmlcov .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
