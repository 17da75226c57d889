# Everything runs from a bare clone with Python (3.11 or newer) and make; the first call fills .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two lanes of tests, one a core; ARGS="-n 0" goes without, as debuggers must.
LANES := -n 2 --dist loadgroup
# Tests start many processes, each of which would compile the package anew.
test test-full test-torch: export PYTHONDONTWRITEBYTECODE :=
# The torch of `make test-torch`: the newest that pyproject.toml allows.
TORCH ?= 2.15.0
TORCH_VENV := .venv-torch-$(TORCH)

.PHONY: setup train test test-full test-torch check static bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shardwise needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0" -e ".[dev]"
	@touch $(READY)

# Train a small Llama on two local ranks (one a GPU where there are any).
train: $(READY)
	$(BIN)/shardwise train $(ARGS)

# The tests, without those marked slow.
test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(LANES) $(ARGS)

# The long ones that `make test` leaves out: on four ranks, killed runs, clusters, every example, large sweeps.
test-full: $(READY)
	$(BIN)/python -m pytest -m slow $(LANES) $(ARGS)

# The tests that a change of torch would break, on another torch: everything on ranks that is not slow, and the slow ones
# marked `torch`. The first call for a version fills a virtual environment of several GB.
test-torch: $(TORCH_VENV)/.ready
	$(TORCH_VENV)/bin/python -m pytest -m "not slow or torch" $(LANES) -o cache_dir=$(TORCH_VENV)/cache \
		tests/distributed tests/unit/sharding tests/unit/compat $(ARGS)

$(TORCH_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -v "^torch==" constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(TORCH_VENV)/constraints.txt "torch==$(TORCH)" -e ".[dev]"
	@touch $@

# What must be clean before a commit.
check: static test

static: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# One JSON line a case; see benchmarks/README.md. ARGS=--toy tries them out, ARGS=--save keeps the results.
bench: $(READY)
	@for name in step planning clip guard checkpoint source_tools data train_overhead; do $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

clean:
	rm -rf .venv .venv-torch-* build .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
