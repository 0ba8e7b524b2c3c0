# Two commands for newcomers: `make run` and `make test`. Each sets up what it needs.

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN_DIR ?= runs/gpt2-stdlib-$(shell date +%Y%m%d-%H%M%S)
KILLS ?= 200
FUZZ_S ?= 300
GPU_MINUTES ?= 10
GPU_DIR ?= runs/gpu
FUZZ_DIR ?= runs/fuzz
CASES ?= 500
SPREAD ?= -n 2 --dist loadfile --no-loadscope-reorder
TORCH_oldest := 2.11.0
TORCH_newest := 2.15.0
export OMP_NUM_THREADS ?= 1

.PHONY: run test lint bench goodput docs dist clusters parity faults fuzz fuzz-strategies oldest newest gpu clean help

help:
	@echo "make run     train a small GPT-2 on the Python standard library, 2 processes, about two minutes"
	@echo "make test    lint, types and all tests"
	@echo "make lint    ruff and mypy alone"
	@echo "make parity  strategies and optimizers against one process, the whole matrices (make test runs a part of them)"
	@echo "make faults  hundreds of killed runs and damaged files; KILLS=200 of them"
	@echo "make fuzz    every parser against hostile files, FUZZ_S=300 seconds each with hypothesis and with atheris"
	@echo "make fuzz-strategies  random strategies on 2 to 8 ranks against one process, CASES=500 of them, about two hours"
	@echo "make oldest  all tests with the oldest torch that is supported, in an environment of its own (several GB)"
	@echo "make newest  the same with the newest torch that has been tried"
	@echo "make bench   beside DDP, FSDP2, DeepSpeed, Accelerate and Fabric; then overhead and optimizers"
	@echo "make goodput training under failures, 2 and 4 ranks, beside checkpoints alone and torchrun; about 40 minutes"
	@echo "make gpu     on a machine with GPUs: whether all is right there and how fast, GPU_MINUTES=10; goes on where it stopped"
	@echo "make docs    the manual, into site/: open site/index.html, or SERVE=1 serves it while pages are edited"
	@echo "make dist    a wheel and a source archive in dist/, installed and run in an empty environment"
	@echo "make clusters  Slurm (Debian's packages, unpacked into a scratch folder), torchrun with two agents: stopped and resumed"
	@echo "make clean   remove the virtual environment and caches"

# The first Python that is new enough; an older default or a broken shim is passed over.
$(READY): pyproject.toml constraints.txt
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "Meshwright needs Python 3.11 or newer. What to do: make PYTHON=/path/to/python3.11 …"; exit 1; fi; \
	echo "Setting up $(VENV) with $$($$found --version); the first time takes a few minutes."; \
	$$found -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,hf,tensorboard]'
	@touch $(READY)

run: $(READY)
	$(BIN)/meshwright train examples/gpt2/stdlib.toml --out $(RUN_DIR)
	@echo; echo "The same run, resumed from its last checkpoint for 25 more steps:"; echo
	$(BIN)/meshwright train examples/gpt2/stdlib.toml --out $(RUN_DIR) --resume --steps 575

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes, each with files of its own, the slowest first (tests/conftest.py): while ranks of one wait for each
# other, the other computes. Where Python writes no bytecode, every process that a test starts would compile the package.
test: lint
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest $(SPREAD)

parity: $(READY)
	$(BIN)/python -m pytest --parity=all tests/methods/test_parity.py tests/optim/test_parity_table.py tests/parity
	$(BIN)/python -m pytest --parity=all -m long --ignore=tests/parity

faults: $(READY)
	$(BIN)/python -m pytest --parity=all --kills=$(KILLS) tests/faults

fuzz: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m pytest --fuzz-s=$(FUZZ_S) tests/fuzz
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_S) --out $(FUZZ_DIR)

fuzz-strategies: $(READY)
	$(BIN)/python -m tests.fuzz.strategies --cases $(CASES) --out $(FUZZ_DIR)/strategies

oldest newest: %: $(VENV)-%/.ready
	$(VENV)-$*/bin/python -m compileall -q src
	$(VENV)-$*/bin/python -m pytest $(SPREAD)

$(VENV)-oldest/.ready $(VENV)-newest/.ready: $(VENV)-%/.ready: $(READY) Makefile
	$(BIN)/python -m venv $(VENV)-$*
	sed 's/^torch==.*/torch==$(TORCH_$*)/' constraints.txt > $(VENV)-$*/constraints.txt
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(VENV)-$*/constraints.txt --editable '.[dev,hf,tensorboard]'
	@touch $@

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]' setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation deepspeed \
	  || echo "DeepSpeed could not be installed; the benchmark leaves its rows out."
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/clip.py
	$(BIN)/python benchmarks/optimizers.py

goodput: $(READY)
	$(BIN)/python benchmarks/goodput.py --out benchmarks/goodput.json

# Where torch and what the package needs are installed, nothing is downloaded: such machines may have no network.
gpu:
	@if python3 -c 'import pydantic, pytest, rich, safetensors, torch, typer' 2>/dev/null; then found=python3; \
	else $(MAKE) $(READY) && found=$(BIN)/python; fi; \
	$$found benchmarks/gpu.py --minutes $(GPU_MINUTES) --out $(GPU_DIR)

docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(SERVE),serve,build --strict --quiet)
	@echo "The manual is in site/: open site/index.html."

# Built from the source archive, as whoever installs from it would; then tried where no source is at hand.
dist: $(READY)
	rm -rf dist build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tests/installed.py dist/*.whl

# Never in the tests: it downloads packages, as root, and starts daemons (on loopback, ended at the end).
clusters: $(READY)
	$(BIN)/python -m tests.clusters

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
