# `make` says what there is. Every target makes .venv first, if it is not there yet.

# make train PYTHON=python3.12     another interpreter (3.9 to 3.13)
# make train MXNET=mxnet-cu117     MXNet's build for NVIDIA GPUs
# make train UV=                   Python's own venv and pip although uv is installed
VENV ?= .venv
PY := $(VENV)/bin/python
CONFIG ?= configs/lenet/default.yaml
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

.PHONY: help venv train detect segment bench bench-peers horovod test test-slow test-more test-seeds test-all lint notebooks docs requirements gpu-check clean
.DEFAULT_GOAL := help

help:
	@echo "make train        train LeNet on handwritten digits, on two CPU devices or on all GPUs (ARGS='--epochs 3' adds options)"
	@echo "make detect       train a small Faster R-CNN to find handwritten digits on photographs (pictures, mAP); 5 minutes"
	@echo "make segment      train a small FCN to find handwritten digits on photographs, pixel by pixel; 12 minutes (ARGS as above)"
	@echo "make test         lint, type check and all tests but the slowest; 7 minutes"
	@echo "make test-slow    the longer tests; 23 minutes; some install into fresh environments and need the package index"
	@echo "make test-more    more states of lost processes and other places of random programs, like those of test-slow"
	@echo "make test-all     all three"
	@echo "make test-seeds   the tests that compare random numbers, with 20 seeds, NEW=10 of them new each time; 17 minutes (SEEDS=5: fewer)"
	@echo "make bench        all benchmarks, and docs/benchmarks.md from what they measure; 45 minutes (ARGS=--quick: 5; ARGS='--only processes')"
	@echo "make bench-peers  the same for other libraries: builds Horovod, and PyTorch's 7 GB, the first time; 40 minutes (ARGS=--quick; ARGS='--only peers_processes')"
	@echo "make horovod      build Horovod 0.28.1 for MXNet into .venv-horovod, once, and run the tests that need it; 4 minutes; needs a C++ compiler"
	@echo "make gpu-check    try everything that needs GPUs on this machine's, and write gpu-report.txt; says why where there are none"
	@echo "make lint         ruff and mypy alone"
	@echo "make notebooks    run the tutorials (docs/tutorials) and write them as notebooks with outputs; 3 minutes; says how to open them"
	@echo "make docs         build the documentation site, with every notebook run, into build/docs; 4 minutes, installs into .venv-docs the first time"
	@echo "make venv         only install; PYTHON=python3.12 chooses the interpreter (3.9 to 3.13)"
	@echo "make requirements resolve requirements.txt anew from the ranges in setup.py (needs uv)"
	@echo "make clean        remove .venv, .venv-docs, .venv-horovod, .venv-torch and what tools have left behind"
	@echo "Durations are those of 2 idle cores."

venv:
	@sh scripts/make_venv.sh

train: venv
	$(PY) scripts/train_lenet.py --config $(CONFIG) $(ARGS)

detect: venv
	$(PY) scripts/train_faster_rcnn.py $(ARGS)

segment: venv
	$(PY) scripts/train_segmentation.py $(ARGS)

bench: venv
	$(PY) scripts/bench.py $(ARGS); failed=$$?; $(PY) scripts/write_benchmarks.py && exit $$failed

# Looks for a GPU before anything is fetched; then installs MXNet's build for GPUs, unless there is one.
gpu-check:
	@$(or $(PYTHON),python3) scripts/gpu_check.py --dry-run >/dev/null
	@MXNET=$${MXNET:-$$(grep -sx 'mxnet-cu.*' $(VENV)/.mxnet || echo mxnet-cu112)} sh scripts/make_venv.sh
	$(PY) scripts/gpu_check.py $(ARGS)

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Files run side by side, on two workers more than there are cores, since many tests wait for other processes. A file
# stays on one worker, so what it builds, it builds once. ARGS='-n 0' runs one test after the other.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 6 ? cores + 2 : 8)))
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=15

test: lint
	$(PYTEST) -m "not slow" $(ARGS)
	@echo "The slow tests were left out; 'make test-slow' runs them."

# One worker fewer, for these compute more, and some take gigabytes of memory.
test-slow: venv
	$(PYTEST) -n $$(($(WORKERS) - 1)) -m "slow and not exhaustive" $(ARGS)

test-more: venv
	$(PYTEST) -n $$(($(WORKERS) - 1)) -m exhaustive $(ARGS)

test-all: test test-slow test-more

# NEW of the seeds are drawn anew each time, the others are 1, 2, ...; the first lines show them. ARGS='--seeds 7' runs
# seed 7 alone. Five seeds at a time, since MXNet does not give back the memory of threads that have ended.
SEEDS ?= 20
NEW ?= 10
DRAW := import random; n = $(SEEDS) - $(NEW); seeds = [*range(1, n + 1), *random.sample(range(1000, 10**6), $(NEW))]; \
	print(*(",".join(map(str, seeds[i : i + 5])) for i in range(0, len(seeds), 5)))
test-seeds: venv
	for seeds in $$($(PY) -c '$(DRAW)'); do $(PYTEST) -m "arithmetic and not slow" --seeds $$seeds $(ARGS) || exit 1; done

# Horovod and PyTorch, in environments of their own.
bench-peers: venv
	@sh scripts/make_horovod.sh
	@VENV=.venv-torch REQUIREMENTS=requirements-torch.txt sh scripts/make_venv.sh
	@$(MAKE) --no-print-directory bench ARGS="--peers $(ARGS)"

# The tests that skip where Horovod is not installed, slow ones too.
horovod: PY := .venv-horovod/bin/python
horovod:
	@sh scripts/make_horovod.sh
	$(PYTEST) -k horovod $(ARGS)

notebooks: venv
	$(PY) scripts/write_notebooks.py

# The newest Python here that the builder runs on, in an environment of its own; a warning is an error. Notebooks run again
# when they or the package have changed.
DOCS_PYTHON = $(or $(PYTHON),$(shell for python in python3.13 python3.12 $$HOME/.pyenv/versions/3.13.*/bin/python3 \
	$$HOME/.pyenv/versions/3.12.*/bin/python3; do "$$python" -c "" 2>/dev/null && echo "$$python" && break; done))
docs:
	@test -n "$(DOCS_PYTHON)" || { echo "make docs: needs Python 3.12 or 3.13; name one: make docs PYTHON=/path/to/python3.13"; exit 1; }
	@VENV=.venv-docs PYTHON="$(DOCS_PYTHON)" REQUIREMENTS=docs/requirements.txt sh scripts/make_venv.sh
	.venv-docs/bin/python -m sphinx -W --keep-going -q -d build/docs-doctrees docs build/docs
	@echo "open build/docs/index.html"

EXTRAS := import importlib.metadata as m; \
	wanted = lambda condition: not condition or "all" in condition or "test" in condition; \
	print(*(r.split(";")[0] for r in m.requires("gluon-parallel") if wanted(r.partition(";")[2])), sep="\n")
requirements: venv
	$(PY) -c '$(EXTRAS)' | uv pip compile --quiet --universal --python-version 3.9 --only-binary :all: --upgrade \
		--no-header --no-annotate --output-file requirements.tmp -
	@echo "# The versions that were tested together, for Python 3.9 to 3.13. Written by \`make requirements\` from the ranges in setup.py." >requirements.txt
	@sed -E "s/ and (implementation_name|platform_python_implementation|sys_platform) [!=]= '[A-Za-z]*'//g; s/( and| ;) python_full_version < '3.14'//" requirements.tmp >>requirements.txt
	@rm requirements.tmp

clean:
	rm -rf $(VENV) .venv-docs .venv-horovod .venv-torch build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
