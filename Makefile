# Two commands for a newcomer: `make demo` and `make test`. Each works alone on a fresh clone.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test bench lint types clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/thinwire compare --task digits --workers 2 --link 25mbit --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: lint types
	$(BIN)/python -m pytest

# Ratios against those that were recorded; a quarter above one of them is an error. The machine must be quiet.
bench: $(VENV)/.ready
	$(BIN)/python benchmarks/kernels.py --against benchmarks/recorded/kernels.json
	$(BIN)/python benchmarks/codec.py --against benchmarks/recorded/codec.json
	$(BIN)/python benchmarks/memory.py --against benchmarks/recorded/memory.json
	$(BIN)/python benchmarks/step.py --against benchmarks/recorded/step.json

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.ready
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
