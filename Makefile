# The targets that a person needs; `make help` lists them. Each sets up what it needs first, and a second run installs nothing.

PYTHON := .venv/bin/python
# Test processes side by side. The cluster tests mostly wait, so more of them than cores pays; tests/schedule.py has them
# run beside the others, which compute, and the long ones first.
WORKERS ?= 4
TESTS ?= tests/cluster tests/contract tests/unit

# Else each of the many processes that a test starts compiles all that it imports of transom again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test chaos bench check wheel-smoke docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Set everything up, then show a training job that survives the loss of a node (root; about 5 minutes)
	@scripts/bootstrap
	.venv/bin/python scripts/demo.py

test: ## Set everything up, then run all tests, on a real Slurm in a sandbox too (root; at most 15 minutes)
	@scripts/bootstrap
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(TESTS)

chaos: ## Slow tests, kills and power cuts of checkpoints, random faults on three jobs for 10 minutes, or HOURS=; SEED=, REPORT= (root)
	@scripts/bootstrap
	$(PYTHON) -m pytest -n 2 -m slow tests/unit tests/cluster
	$(PYTHON) tests/chaos/tce_kills.py --seconds 60
	$(PYTHON) tests/chaos/tce_torn.py --seconds 30
	$(PYTHON) tests/chaos/run.py

bench: ## Measure recovery beside sbatch --requeue, both Slurm clients, the store, the prolog and checkpoints (root; about an hour)
	@scripts/bootstrap
	$(PYTHON) tests/bench/recovery.py
	$(PYTHON) tests/bench/slurm_clients.py
	$(PYTHON) tests/bench/store_million.py
	$(PYTHON) tests/bench/hooks_prolog.py
	rm -rf build/bench && mkdir -p build/bench && $(PYTHON) tests/bench/checkpoint.py --dir build/bench

check: ## Check formatting, lint and types
	@scripts/bootstrap --python-only
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

wheel-smoke: ## Build the wheel, install it in an empty environment and use it
	@scripts/bootstrap --python-only
	$(PYTHON) scripts/wheel_smoke.py

docs: ## Write the tables in docs/ anew from the enumerations
	@scripts/bootstrap --python-only
	$(PYTHON) scripts/gen_docs.py

clean: ## Remove caches and build outputs (the environment stays; `rm -r .venv` removes it)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage *.egg-info
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
