# Two commands do everything: `make demo` and `make test`. Both install into .venv first, if need be.
PYTHON ?= python3.11
VENV := .venv
LOCK := tools/locks/cpu-py311.txt
BIN := $(VENV)/bin
# Named by the lock's content, so that a checkout that only touches the file installs nothing again.
PACKAGES := $(VENV)/.packages-$(shell cksum < $(LOCK) | cut -d' ' -f1)
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install demo test lint clean

install: $(VENV)/.installed

$(PACKAGES):
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; the CPU set needs Python 3.11 (make PYTHON=/path/to/python3.11)"; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q --no-deps --no-compile -r $(LOCK)
	@touch $@

$(VENV)/.installed: $(PACKAGES) pyproject.toml
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

demo: install
	$(BIN)/megatron-stream rl experiment=demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
