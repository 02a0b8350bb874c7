# `make` says what there is. Every target makes .venv first, if it is not there yet.

# make train PYTHON=python3.12     another interpreter (3.9 to 3.13)
# make train MXNET=mxnet-cu117     MXNet's build for NVIDIA GPUs
# make train UV=                   Python's own venv and pip although uv is installed
VENV ?= .venv
PY := $(VENV)/bin/python
ARGS ?=

# Exported only when given, so that the script can tell "not said" from "said: empty".
export VENV
ifdef PYTHON
export PYTHON
endif
ifdef MXNET
export MXNET
endif
ifneq ($(origin UV),undefined)
export UV
endif

.PHONY: help venv train lint test docs-venv docs notebooks bench release clean
.DEFAULT_GOAL := help

help:
	@echo "make train      train LeNet on handwritten digits, on two CPU devices or on all GPUs (ARGS='--epochs 3' adds options)"
	@echo "                TASK=faster_rcnn (5 minutes), segmentation (12), text_lstm or pipeline: another of scripts/train_*.py"
	@echo "make test       lint, type check and all tests but the slowest; 6 minutes (ARGS='-k empty' adds options of pytest)"
	@echo "                TESTS=slow (20 minutes), more (rare states and variants) or seeds (9 minutes): those alone"
	@echo "make lint       ruff and mypy alone"
	@echo "make docs       build the documentation site, with every notebook run, into build/docs; 4 minutes"
	@echo "make notebooks  run the tutorials (docs/tutorials) and write them as notebooks with outputs; 3 minutes"
	@echo "make bench      all benchmarks, and docs/benchmarks.md from what they measure; 45 minutes (ARGS=--quick: 5)"
	@echo "                PEERS=1: those with Horovod and PyTorch (7 GB), which are installed the first time; 40 minutes"
	@echo "make release    build wheel and source archive into dist, try both on Python 3.9 and 3.13, and build the site; 12 minutes"
	@echo "make venv       only install; PYTHON=python3.12 chooses the interpreter (3.9 to 3.13)"
	@echo "make clean      remove .venv, .venv-docs, .venv-horovod, .venv-torch and what tools have left behind"
	@echo "Durations are those of 2 idle cores."

venv:
	@sh scripts/make_venv.sh

TASK ?= lenet
train: venv
	$(PY) scripts/train_$(TASK).py $(ARGS)

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Files run side by side, on one worker more than there are cores, since many tests wait for other processes; slow ones on
# two more. A file stays on one worker, so what it builds, it builds once. ARGS='-n 0' runs one test after the other.
WORKERS ?= $(shell most=$$(($$(nproc) + $(if $(filter fast seeds,$(TESTS)),1,2))); echo $$((most < 8 ? most : 8)))
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=15

# NEW of the seeds are drawn anew each time, the others are 1, 2, ...; the first lines show them. ARGS='--seeds 7' runs
# seed 7 alone. Five seeds at a time, since MXNet does not give back the memory of threads that have ended.
SEEDS ?= 20
NEW ?= 10
# Minutes of random trainings against one device; with NEW=0 they are those of seed 1 and the next ones.
MINUTES ?= 2
DRAW := import random; n = $(SEEDS) - $(NEW); seeds = [*range(1, n + 1), *random.sample(range(1000, 10**6), $(NEW))]; \
	print(*(",".join(map(str, seeds[i : i + 5])) for i in range(0, len(seeds), 5)))

RUN_fast = $(PYTEST) -m "not slow" $(ARGS)
RUN_slow = $(PYTEST) -m "slow and not exhaustive" $(ARGS)
RUN_more = $(PYTEST) -m exhaustive $(ARGS)
RUN_seeds = for seeds in $$($(PY) -c '$(DRAW)'); do $(PYTEST) -m "arithmetic and not slow" --seeds $$seeds $(ARGS) || exit 1; done \
	&& $(PY) scripts/studies/random_trainings.py --quiet --minutes $(MINUTES) $(if $(filter 0,$(NEW)),--seed 1)

TESTS ?= fast
test: $(if $(filter fast,$(TESTS)),lint,venv)
	$(or $(RUN_$(TESTS)),$(error TESTS=$(TESTS): there are fast, slow, more and seeds))

# The newest Python here that the builder runs on, in an environment of its own; a warning is an error. Notebooks run again
# when they or the package have changed.
DOCS_PYTHON = $(or $(PYTHON),$(shell for python in python3.13 python3.12 $$HOME/.pyenv/versions/3.13.*/bin/python3 \
	$$HOME/.pyenv/versions/3.12.*/bin/python3; do "$$python" -c "" 2>/dev/null && echo "$$python" && break; done))
docs-venv:
	@test -n "$(DOCS_PYTHON)" || { echo "make docs: needs Python 3.12 or 3.13; name one: make docs PYTHON=/path/to/python3.13"; exit 1; }
	@VENV=.venv-docs PYTHON="$(DOCS_PYTHON)" REQUIREMENTS=docs/requirements.txt sh scripts/make_venv.sh

docs: docs-venv
	.venv-docs/bin/python -m sphinx -W --keep-going -q -d build/docs-doctrees docs build/docs
	@echo "open build/docs/index.html"

notebooks: venv
	$(PY) scripts/write_notebooks.py

# Horovod and PyTorch are in environments of their own.
bench: venv
	$(if $(PEERS),sh scripts/make_horovod.sh && VENV=.venv-torch REQUIREMENTS=requirements-torch.txt sh scripts/make_venv.sh)
	$(PY) scripts/bench.py $(if $(PEERS),--peers) $(ARGS); failed=$$?; $(PY) scripts/write_benchmarks.py && exit $$failed

release: venv
	$(PY) scripts/release.py
	@$(MAKE) --no-print-directory docs

clean:
	rm -rf $(VENV) .venv-docs .venv-horovod .venv-torch build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
