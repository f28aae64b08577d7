# Everything a newcomer needs: `make demo`, then `make test`. Both set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo results test test-real lint accept soak bench docs clean

$(BIN)/polar: pyproject.toml constraints.txt
	@echo "setting up $(VENV): PyTorch and the rest, some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(BIN)/polar  ## The main job on the embedded default: real harnesses, bundled model, one step of GRPO, no GPU. `polar demo` learns.
	$(BIN)/polar demo --quick

results: $(BIN)/polar  ## polar demo for seeds 0, 1, 2 and its control, into docs/results.md; about half an hour.
	$(BIN)/python scripts/demo_results.py

test: $(BIN)/polar  ## Without real CLIs and engines; some minutes.
	$(BIN)/pytest -m "not real and not accept" -n 2 --dist loadfile

test-real: $(BIN)/polar  ## Real CLIs, real vLLM, real processes; minutes.
	bash tests/real/install_vllm.sh
	$(BIN)/pytest -m "real and not accept"

lint: $(BIN)/polar
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

accept: $(BIN)/polar  ## The acceptance runs of full size.
	bash tests/real/install_vllm.sh
	$(BIN)/pytest -m "accept or real" --timeout 7200

SEEDS ?= 1 2
soak: $(BIN)/polar  ## The fault test at full size: 200 sessions for each of SEEDS; some minutes each.
	$(BIN)/python tests/soak/soak.py $(SEEDS:%=--seed %)

bench: $(BIN)/polar
	$(BIN)/python bench/gateway.py
	$(BIN)/python bench/rollout.py
	$(BIN)/python bench/train.py

docs: $(BIN)/polar  ## docs/reference.md and the tables that are made from the code.
	$(BIN)/python scripts/make_reference.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
