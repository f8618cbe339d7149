# Everything works on a fresh clone with nothing but Python >= 3.11.4, make and a package index.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: install demo test lint bench soak docs wheel clean

install: $(VENV)/.dev

demo: $(VENV)/.core
	$(BIN)/kedge demo

# Two tests at a time, a core for each: more threads would only wait for each other.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder

# Everything: the tests, then the long ones one by one, since several measure what a loaded machine does.
soak: test
	$(BIN)/pytest -m soak -v

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/exact_map.py
	$(BIN)/python benchmarks/embedding.py

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is released, tried as a stranger would: in an environment of its own, from a folder of its own.
wheel: $(VENV)/.dev
	rm -rf dist build
	$(BIN)/python -m build
	$(PYTHON) -m venv build/stranger
	build/stranger/bin/python -m pip install dist/kedge-*.whl
	cd "$$(mktemp -d)" && $(CURDIR)/build/stranger/bin/kedge demo

clean:
	rm -rf $(VENV) build dist site src/*.egg-info

# A stamp per set of dependencies: nothing is installed, let alone downloaded, twice.
$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable ".[serve,pretrained]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable ".[dev]"
	@touch $@ $(VENV)/.core

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "Kedge needs Python 3.11.4 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
