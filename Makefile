# `make demo` and `make test` need Python >= 3.10 and a C++ compiler, nothing else: they make their own environment.
# `make test VENV=` uses the packages of $(PYTHON) as they are (a GPU machine without a network, a container).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

ifeq ($(strip $(VENV)),)
READY :=
PY := $(PYTHON)
CLANG_FORMAT := clang-format
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
else
READY := $(VENV)/.ready
PY := $(VENV)/bin/python
CLANG_FORMAT := $(VENV)/bin/clang-format
endif

.PHONY: demo test test-slow test-emulated fuzz lint format bench wheel clean

demo: $(READY)
	$(PY) -m replayssm_jit demo $(ARGS)

test: $(READY)
	$(PY) -m pytest $(ARGS)

test-slow: $(READY)
	$(PY) -m pytest -m slow $(ARGS)

# The behaviour tests on the CUDA kernels, without a GPU.
test-emulated: $(READY)
	$(PY) -m pytest --emulate 0 $(addsuffix .py,$(addprefix tests/test_,step trees delta standard cache determinism interop state_machine)) $(ARGS)

# Random lives a family and kind of checkpoint; ARGS="-k gdn-plain" chooses one.
LIVES ?= 3000
fuzz: $(READY)
	$(PY) -m pytest tests/test_state_machine.py -s --fuzz $(LIVES) $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	find csrc -type f | xargs -r $(CLANG_FORMAT) --dry-run -Werror

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	find csrc -type f | xargs -r $(CLANG_FORMAT) -i

bench: $(READY)
	$(PY) benchmarks/jit.py
	$(PY) benchmarks/cpu.py

wheel: $(READY)
	$(PY) -m build --wheel

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

ifneq ($(READY),)
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON=" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev,cu13]'
	touch $@
endif
