# make setup       .venv with everything below; does nothing when up to date
# make quickstart  finetune a real model on real rows, evaluated before and after (minutes on two cores)
# make test-fast   under 3 minutes      make test   under 15 minutes, what .ci/run runs
# make proof       the long claims, each measured into proof.jsonl; one of them with ROW=name
# make lint | format | docs | bench (one part with PART=sft, grpo-step, grpo-sync or grpo-memory)
# PYTHON names the interpreter that .venv is made from (3.11 or newer).

PYTHON ?= python3
PY := .venv/bin/python
# Tests share the cores as processes: one thread each, or the processes wait for each other's threads.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadgroup

.PHONY: setup quickstart test-fast test proof lint format docs bench

setup:
	@$(PYTHON) scripts/setup_environment.py

quickstart: setup
	@$(PY) scripts/quickstart.py

test-fast: setup
	$(PYTEST) -m "not slow and not proof"

test: setup
	$(PYTEST) -m "not proof"

proof: setup
	$(PY) -m proof $(ROW)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: setup
	$(PY) scripts/make_docs.py

bench: setup
	$(PY) -m bench $(PART)
