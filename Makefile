# Each target sets up what it needs: a virtual environment in .venv, this package in it, nothing else.
# Versions are pinned by constraints.txt to the ones the measurements in docs/ were made with.
#
#   PYTHON     the interpreter that makes the environment (3.11 or newer)
#   GPU_FLAGS  options of `python3 -m benchmarks.gpu` for `make gpu`
#   PYTEST_FLAGS  more options for `make test` and `make quick`; --long runs what CI runs
#   SECONDS    length of `make soak`
#   PIP_FLAGS  more options for pip; on Linux without a GPU, name PyTorch's index of CPU wheels here,
#              otherwise pip brings several gigabytes of CUDA packages along

PYTHON    ?= python3
PIP_FLAGS ?=
SECONDS   ?= 3600
VENV      := .venv
WHEELS    := .venv-wheels
PEERS     := .peers
CUDA      := .cuda
NVIDIA    := .nvidia
HOST      := .venv-host
OLDEST    := .venv-310
BIN       := $(VENV)/bin
PYTEST    := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
INSTALL   := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)

.PHONY: demo test quick lint peers cuda-tools nvidia host python310 fuzz fuzz-native fuzz-cuda soak bench gpu wheels clean help

help:            ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

demo: $(VENV)/export.stamp  ## install, export the bundled model, stream text from it
	$(BIN)/topw-export demo out-demo --overwrite
	$(BIN)/topw generate out-demo "class Path" --preset lively --seed 2 --max-new-tokens 120 --stats

test: $(VENV)/dev.stamp     ## install and run the tests on all cores, without the long ones
	$(PYTEST) $(PYTEST_FLAGS)

quick: $(VENV)/dev.stamp    ## the same without the slow ones: every module, in about four minutes
	$(PYTEST) --quick $(PYTEST_FLAGS)

lint: $(VENV)/dev.stamp     ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

peers: $(PEERS)/folders.stamp  ## folders by optimum, mobius and onnxruntime-genai's builder for `make test` to graft onto

cuda-tools: $(CUDA)/tools.stamp $(CUDA)/onnxruntime.stamp  ## NVIDIA's compilers and onnxruntime-gpu, for `make test`

nvidia: $(NVIDIA)/ready.stamp  ## NVIDIA's ONNX parser and builder as pip packages, for `make test`; they need no GPU

host: $(HOST)/ready.stamp  ## the Python and the packages of a GPU host, in which `make test` rehearses `make gpu`

python310: $(OLDEST)/ready.stamp  ## Python 3.10 with onnxruntime 1.23, as on JetPack 6, for `make test`

fuzz: $(VENV)/dev.stamp     ## random rows through every sampler there is, against the reference (about an hour)
	$(BIN)/python -m fuzz.sampler --rows 250000
	$(BIN)/python -m fuzz.tail --rows 100000
	$(BIN)/python -m fuzz.rules --rows 20000

fuzz-native: $(VENV)/dev.stamp  ## the native sampler under address and undefined-behaviour sanitizers, ten minutes
	$(BIN)/python -m fuzz.native --seconds 600

fuzz-cuda: $(VENV)/dev.stamp  ## random rows through the CUDA kernels in emulation, against the reference
	$(BIN)/python -m fuzz.cuda --rows 50000
	$(BIN)/python -m fuzz.cuda_rules

soak: $(VENV)/dev.stamp     ## random callers, faults and restarts of the batching engine, an hour; SECONDS=600 for less
	$(BIN)/python -m fuzz.engine --seconds $(SECONDS)

bench: $(VENV)/dev.stamp    ## the figures of docs/lab/benchmarks.md
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
	rm -rf $(VENV) $(WHEELS) $(PEERS) $(CUDA) $(NVIDIA) $(HOST) $(OLDEST) out-demo dist build

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

$(VENV)/dev.stamp: $(VENV)/export.stamp
	$(INSTALL) -e '.[dev]'
	@touch $@

# Other exporters, every package pinned: optimum in one environment, onnxruntime-genai and mobius in the other. Modules
# are compiled when they are first used; most never are.
$(PEERS)/%.stamp: tests/peers/%.txt
	$(PYTHON) -m venv --clear $(PEERS)/$*
	$(PEERS)/$*/bin/pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -r $<
	@touch $@

$(PEERS)/folders.stamp: $(VENV)/dev.stamp $(PEERS)/optimum.stamp $(PEERS)/genai.stamp \
		tests/peers/models.py tests/peers/make_folders.py tests/peers/run_builders.py
	$(BIN)/python -m tests.peers.make_folders $(PEERS)
	@touch $@

# CUDA 13's nvcc and CUDA 12's run-time compiler. An nvcc on PATH goes before the former.
$(CUDA)/tools.stamp: tests/plugins/cuda/tools.txt
	$(PYTHON) -m venv --clear $(CUDA)/tools
	$(CUDA)/tools/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps $(PIP_FLAGS) -r $<
	@touch $@

# onnxruntime's CUDA provider, which tests open over a stand-in for CUDA's runtime.
$(CUDA)/onnxruntime.stamp: tests/cuda_provider/requirements.txt
	$(PYTHON) -m venv --clear $(CUDA)/onnxruntime
	$(CUDA)/onnxruntime/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps $(PIP_FLAGS) -r $<
	@touch $@

# Where these packages cannot be had, the folder says why and the tests are skipped with that reason.
$(NVIDIA)/ready.stamp: $(VENV)/dev.stamp tests/nvidia/requirements.txt tests/nvidia/make_environment.py
	$(BIN)/python -m tests.nvidia.make_environment $(NVIDIA) $(PIP_FLAGS)
	@touch $@

# The versions that a GPU host has, with nothing of this project.
$(HOST)/ready.stamp: tests/gpu/host.txt .ci/find-python
	"$$(.ci/find-python 3.12)" -m venv --clear $(HOST)
	$(HOST)/bin/pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -r $<
	@touch $@

# The runtime alone, in the oldest Python and onnxruntime that it supports.
$(OLDEST)/ready.stamp: tests/python310/requirements.txt pyproject.toml setup.py .ci/find-python
	"$$(.ci/find-python 3.10)" -m venv --clear $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c $< -e '.[cpu]'
	@touch $@
