# `make` lists what there is. Every target sets up what it needs by itself, once; Python 3.11+ is all that must be there.

PY := .venv/bin/python
SETUP = @python=$$(tools/find-python) && "$$python" -I tools/setup.py

.PHONY: help setup check test demo bench generate
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##/\1	/p' Makefile | expand -t 12

setup:  ## make .venv with sandbox-queue (editable) and all development tools
	$(SETUP) dev

check: setup  ## lint, format, types, layers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pyright
	.venv/bin/lint-imports

test: setup  ## the tests, with real servers; make test ARGS="-k cancel"
	$(PY) -m pytest $(ARGS)

demo:  ## a first look: steps through a queue, their output live
	$(SETUP)
	@$(PY) examples/hello.py

bench:  ## measure latency and throughput on this machine; make bench ARGS="--help"
	$(SETUP) bench
	$(PY) -m benchmarks $(ARGS)

generate: setup  ## write schemas/*.json and docs/settings.md anew from the code
	$(PY) tools/generate.py
