# `make train` and `make test` work on a fresh clone with only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt
ifndef RUN
RUN := runs/lunar-lander-$(shell date +%Y%m%d-%H%M%S)
endif

.PHONY: train test test-all bench chaos reproduce-smoke lint docs dist peers proto clean

# What training needs.
$(VENV)/base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "coterie needs Python 3.11 or newer; set PYTHON="; exit 1; }
	@echo "Installing Coterie in $(VENV) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[envpool,video,plots]'
	@echo "Installed: $$(du -sm $(VENV) | cut -f1) MB"
	@touch $@

# And what the tests, the documentation and every command need.
$(VENV)/installed: $(VENV)/base
	$(PIP) -e '.[dev]'
	@touch $@

# LunarLander, solved (a mean return of 200) in about a minute and a half by two PPO learners.
train: $(VENV)/base
	$(BIN)/coterie train ppo --env LunarLander-v3 --learners 2 --out $(RUN) $(ARGS)
	$(BIN)/coterie eval $(RUN) --episodes 100
	$(BIN)/coterie report $(RUN) --video
	@echo
	@echo "The run is in $(RUN): watch.mp4 is an episode, report.html has the curves."
	@echo "Next: $(BIN)/coterie train ppo --env Pong-v5        Atari, about an hour and a half on two cores"
	@echo "      $(BIN)/coterie train ppo --env my_env:MyEnv   your environment: docs/start/first-env.md"

test: $(VENV)/installed lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal $(ARGS)

test-all: $(VENV)/installed lint
	$(BIN)/python -m pytest $(ARGS)

# The environments of the frameworks that benchmarks/peers/compare.py measures (5 GB), in .peers.
PEERS := sb3 sample-factory rllib
peers: $(VENV)/base $(PEERS:%=.peers/%/installed)

.peers/%/installed: benchmarks/peers/requirements/%.txt
	$(PYTHON) -m venv .peers/$*
	.peers/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# docs/benchmarks/speed.md, as far as this machine can repeat it, in two hours without anything beside it: each layout,
# the start, then the other frameworks (first: make peers).
bench: $(VENV)/installed
	$(BIN)/python benchmarks/layouts.py cpu --seconds $(or $(SECONDS),60) --out docs/benchmarks/data/layouts.json --page
	$(BIN)/python benchmarks/layouts.py vectors --seconds 30 --out docs/benchmarks/data/vectors.json --page
	$(BIN)/python benchmarks/startup.py --out docs/benchmarks/data/startup.json --page
	$(BIN)/python benchmarks/peers/compare.py --seconds 15 --page
	$(BIN)/python benchmarks/peers/chart.py

# Faults on three machines (root, half an hour), a kill every minute (25 minutes), then an hour of chaos on Pong:
# docs/benchmarks/faults.md.
chaos: $(VENV)/installed
	COTERIE_FAULTS=runs/faults.json $(BIN)/python -m pytest tests/launch/test_fault_table.py $(ARGS)
	COTERIE_EFFECTIVE_S=300 COTERIE_EFFECTIVE=runs/effective.json $(BIN)/python -m pytest tests/launch/test_effective_time.py $(ARGS)
	COTERIE_CHAOS_S=3600 COTERIE_CHAOS=runs/chaos.json $(BIN)/python -m pytest tests/launch/test_long_chaos.py $(ARGS)

# Every figure of the papers at its smallest budget (half an hour): docs/guides/reproduce.md.
reproduce-smoke: $(VENV)/installed
	$(BIN)/coterie reproduce all --budget smoke $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python docs/grammar.py

# The site, in build/site.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# A wheel and a source distribution, in dist.
dist: $(VENV)/installed
	$(BIN)/python -m build

# The wire's messages, after a change of coterie.proto.
proto: $(VENV)/installed
	$(BIN)/python -m grpc_tools.protoc -I coterie/wire --descriptor_set_out=coterie/wire/coterie.desc coterie.proto

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
