# The commands of the project; `make` alone lists them.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE # else each process of the tests compiles the package again

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all test-gpu lint format house docs results chaos demo-observe bench bench-gpu clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

.venv/installed: setup.py pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "megascale needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: .venv/installed ## make .venv and install into it

quickstart: install ## train a GPT on real text in 3D parallelism on this machine
	$(BIN)/megascale quickstart

test: install ## the tests, 10 minutes on two quiet cores; JOBS=N at a time (6)
	$(BIN)/python -m pytest -n $(or $(JOBS),6) --dist loadfile

test-all: install ## the tests, the slow ones too
	$(BIN)/python -m pytest -n $(or $(JOBS),6) --dist loadfile --hypothesis-profile all
	$(BIN)/python -m pytest -m slow --hypothesis-profile all # one at a time: clusters, testbeds and limits of the whole host

test-gpu: install ## what only GPUs show: a table and a file to send; GPUS=2, GPUS=8 for several
	$(BIN)/python tools/test_gpu.py --gpus $(or $(GPUS),1)

lint: install ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## put the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

house: install ## measure the structure of the package
	$(BIN)/python tools/house.py

docs: install ## write the generated pages, tables and pictures of docs/, and the Grafana dashboards
	$(BIN)/python tools/page_tables.py
	$(BIN)/python tools/architecture_pictures.py
	$(BIN)/python tools/grafana.py

results: install ## measure a page of docs/results again: PAGE=overlap
	$(BIN)/python tools/results.py $(PAGE)

demo-observe: install ## slow and hang ranks of the quickstart's model, and see who it was
	$(BIN)/python tools/demo_observe.py

chaos: install ## kill, hang and slow ranks of the quickstart's model, and watch it go on
	$(BIN)/python tools/lab chaos

bench: install ## speed beside the peers, on this machine
	$(BIN)/python tools/bench/peers.py

bench-gpu: install ## speed on one GPU beside the peers, in bf16 and fp8; SMALL=1 tries it on a CPU
	$(BIN)/python tools/bench/gpu.py $(if $(SMALL),--small --rounds 1,--install --markdown docs/results/gpu.md)

clean: ## remove what the commands above made
	rm -rf .venv build dist data/quickstart runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
