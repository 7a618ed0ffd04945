# `make train` and `make test` work on a fresh clone with only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test test-all chaos reproduce-smoke lint docs proto clean

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "coterie needs Python 3.11 or newer; set PYTHON="; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[video,gym,ray,dev,plots,export,docs]'
	@touch $@

train: $(VENV)/installed
	$(BIN)/coterie train ppo --env Pong-v5 $(ARGS)

test: $(VENV)/installed lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal $(ARGS)

test-all: $(VENV)/installed lint
	$(BIN)/python -m pytest $(ARGS)

# Faults on three machines (root, half an hour), then an hour of chaos on Pong: docs/explanation/faults.md.
chaos: $(VENV)/installed
	COTERIE_FAULTS=runs/faults.json $(BIN)/python -m pytest tests/launch/test_fault_table.py $(ARGS)
	COTERIE_CHAOS_S=3600 COTERIE_CHAOS=runs/chaos.json $(BIN)/python -m pytest tests/launch/test_long_chaos.py $(ARGS)

# Every figure of the papers at its smallest budget (half an hour): docs/guides/reproduce.md.
reproduce-smoke: $(VENV)/installed
	$(BIN)/coterie reproduce all --budget smoke $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in build/site.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The wire's messages, after a change of coterie.proto.
proto: $(VENV)/installed
	$(BIN)/python -m grpc_tools.protoc -I coterie/wire --descriptor_set_out=coterie/wire/coterie.desc coterie.proto

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
