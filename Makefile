# Two commands for a newcomer: `make demo` and `make test`. Each works alone on a fresh clone.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
FRAMES := .venv-frameworks
CORES  ?= 2
WORKERS = $$(($(CORES) + 1))
OTHER  := .venv-torch-$(TORCH)
# What a version of torch can break: the laws, the doors, checkpoints, captures, compile, and what the pages tell.
PART   ?= tests/methods/test_laws.py tests/doors tests/comm tests/step tests/capture tests/wrappers tests/integrations tests/house

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-frameworks test-torch bench kills fuzz soak docs fmt lint types clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.ready  ## train the digits with several methods over emulated links, and write a report
	$(BIN)/thinwire compare --task digits --workers 2 --link 25mbit --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: lint  ## what must pass before a change lands: format, lint, types, tests (for CORES=2)
	@# types are checked beside the tests, in what these leave free; either failing is a failure
	$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not alone"; tests=$$?; \
	wait $$types && exit $$tests
	@# what measures time needs nobody to be quiet where it may go before all others, as root may have it
	$(BIN)/python tests/support/quiet.py || $(BIN)/python -m pytest -m alone tests/lab

test-all: lint types  ## every method with every capture in real processes: for changes of the core, by hand
	$(BIN)/python -m pytest --all --timeout 1200

$(FRAMES)/.ready: pyproject.toml constraints.txt constraints-frameworks.txt
	$(PYTHON) -m venv $(FRAMES)
	$(FRAMES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-frameworks.txt \
		-e ".[dev,lightning,accelerate,transformers]"
	touch $@

test-frameworks: $(FRAMES)/.ready  ## the adapters with the real Lightning, Accelerate and Trainer, in an environment of their own
	$(FRAMES)/bin/python -m pytest tests/integrations

$(OTHER)/.ready: pyproject.toml constraints.txt
	@test -n "$(TORCH)" || { echo "Say which: make test-torch TORCH=2.6.0"; exit 2; }
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt torch==$(TORCH) -e ".[dev]"
	touch $@

test-torch: $(OTHER)/.ready  ## the tests that torch can break, with TORCH=2.6.0 or another, in an environment of its own (5 GB)
	$(OTHER)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(PART)

bench: $(VENV)/.ready  ## ratios against recorded ones, a quarter above is an error; the machine must be quiet
	$(BIN)/python benchmarks/kernels.py --against benchmarks/recorded/kernels.json
	$(BIN)/python benchmarks/codec.py --against benchmarks/recorded/codec.json
	$(BIN)/python benchmarks/memory.py --against benchmarks/recorded/memory.json
	$(BIN)/python benchmarks/step.py --against benchmarks/recorded/step.json

kills: $(VENV)/.ready  ## kill workers at random times and resume, 100 times or 10 minutes: always a whole set, the same bits
	$(BIN)/python benchmarks/kills.py --kills 100 --seconds 600

docs: $(VENV)/.ready  ## the documents as a site in build/site, readable without a network; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean
	@echo "Open build/site/index.html"

fuzz: $(VENV)/.ready  ## broken messages, checkpoints, spellings, links and records, 20 000 of each: refused in words, or right
	$(BIN)/python benchmarks/fuzz.py

soak: $(VENV)/.ready  ## half an hour of training drawn at random, with faults, resumes and resizes: the laws always hold
	$(BIN)/python benchmarks/soak.py

fmt: $(VENV)/.ready  ## format, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.ready  ## format and lint, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.ready  ## types
	$(BIN)/mypy

clean:  ## the environment and all caches
	rm -rf $(VENV) $(FRAMES) .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
