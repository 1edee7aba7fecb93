# Every target sets up what it needs first; `make` alone lists them.
#   PYTHON=/path/to/python3   the interpreter for .venv, 3.11 or newer      FLAVOUR=cpu|gpu   default: what the machine has
.DEFAULT_GOAL := help
.PHONY: help setup study sweep report test lint verify bench lab clean named-study FORCE

PYTHON ?=
FLAVOUR ?=
STUDY ?=
py := .venv/bin/python

help: ## list the targets
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

setup: .venv/.ready ## make .venv and install the locked packages (quick when nothing changed)
	@echo ".venv is ready"

# Only the script can tell whether .venv still fits this machine, so it is always asked; its answer takes well under a second.
.venv/.ready: FORCE
	@PYTHON="$(PYTHON)" FLAVOUR="$(FLAVOUR)" bash requirements/setup.sh

study: .venv/.ready ## set up, measure this machine (GPU or CPU) and draw the report: the main job
	@code=0; $(py) -m latency_lab study || code=$$?; \
	if [ $$code -le 1 ]; then $(py) -m latency_lab report || exit $$?; fi; exit $$code

sweep: named-study .venv/.ready ## measure one study: make sweep STUDY=notebooks/studies/NAME.yaml
	$(py) -m latency_lab sweep "$(STUDY)"

named-study:
	@test -n "$(STUDY)" || { echo "sweep: name a study: make sweep STUDY=notebooks/studies/NAME.yaml" >&2; exit 2; }

report: .venv/.ready ## draw figures and HTML pages from data/ (no vLLM, no measuring)
	$(py) -m latency_lab report

test: lint ## check style and types, then run all tests
	$(py) -m pytest

lint: .venv/.ready ## check style (ruff) and types (mypy)
	$(py) -m ruff check src tests notebooks
	$(py) -m ruff format --check src tests notebooks
	$(py) -m mypy

verify: .venv/.ready ## recompute the numbers in README.md from data/reference and compare
	$(py) -m latency_lab verify

bench: .venv/.ready ## measure what the study itself costs, and compare it with vLLM's own benchmark (an hour)
	$(py) -m latency_lab bench

lab: .venv/.ready ## open the notebooks in JupyterLab on this machine
	$(py) -m jupyterlab --ip=127.0.0.1 --notebook-dir=notebooks

clean: ## remove .venv and the tools' caches; measured data and figures stay
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find src tests notebooks -name __pycache__ -prune -exec rm -rf {} +
	@echo "kept: data/ and figures/ (your own measurements are in data/runs; delete them by hand)"

FORCE:
