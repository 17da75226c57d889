# Everything runs from a bare clone with Python (3.11 or newer) and make; the first call fills .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two lanes of tests, one a core; ARGS="-n 0" goes without, as debuggers must.
LANES := -n 2 --dist loadgroup
# Tests start many processes, each of which would compile the package anew.
test test-full: export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup train test test-full check static bench clean

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
	rm -rf .venv build .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
