# Every target sets up what it needs. `make help` lists them.

PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
OLDEST := .venv-oldest
BIN = $(VENV)/bin
READY := $(VENV)/.ready
SOAK_MINUTES ?= 30
SOAK_SEED ?= 0
SCHEDULES ?= 10000
SEED ?= 0
REPLAY ?=
EXPERIMENT ?= demo
PROFILE ?= laptop

.DEFAULT_GOAL := help
.PHONY: help setup demo explore fashion fashion-data wordnet test test-oldest test-all test-clusters test-others deployment-test examples examples-large framework replicate shapes torch torch-test jax browser browser-test slurm slurm-test docs docs-tools lint types build lock ui report bench bench-throughput bench-recovery bench-elastic bench-measuring bench-sparse bench-torch bench-baselines bench-examples simulate simulate-fresh mutants validate soak clean frontier

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf '%-18s %s\n' "$$name" "$$text"; done

setup: $(READY) ## make .venv and install dps with everything that it needs

$(READY): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $(READY)

demo: setup ## run the main experiment on digits, print its results, write results/demo/report.html
	$(BIN)/dps run demo

explore: setup ## the questions of demo with 40 seeds, 8 and 32 workers, on virtual time: 640 trials
	$(BIN)/dps run explore

fashion: setup fashion-data ## the same on Fashion-MNIST
	$(BIN)/dps run fashion

# Debian has the data as a package; elsewhere dps downloads them, or says what to do.
fashion-data:
	@test -d /usr/share/datasets/fashion-mnist || ! command -v apt-get >/dev/null || test "$$(id -u)" != 0 \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends dataset-fashion-mnist; } || true

# Tests that start clusters wait most of the time, and watch the clock: more than two at once would
# disturb each other. The others take what the processors have left.
CLUSTERS = $(BIN)/python -m pytest -n 2 --dist loadfile -m
OTHERS = nice -n 19 $(BIN)/python -m pytest -n 2 --dist worksteal -m
SIMULATE_FRESH := $(BIN)/python -m tests.simulator --schedules 320 --fresh $$(git rev-parse HEAD)

# Hundreds of processes import the same modules: they are compiled once, whatever the shell says.
test test-oldest test-all test-clusters test-others deployment-test slurm-test torch-test browser-test: export PYTHONDONTWRITEBYTECODE :=

# The tests $(1) beside the tests $(2), and then $(3) while the first are still going on.
define at-once
	@mkdir -p build; failed=0; \
	$(CLUSTERS) "$(1)" >build/cluster-tests.log 2>&1 & clusters=$$!; \
	$(OTHERS) "$(2)" || failed=1; \
	$(if $(3),$(3) || failed=1;) \
	echo "Those that start clusters, which have begun at the same time:"; \
	wait $$clusters || failed=1; \
	cat build/cluster-tests.log; \
	exit $$failed
endef

test: setup ## run what everybody runs, in minutes: all but the slow tests, and schedules of faults of the present commit's own
	$(call at-once,cluster and not slow and not deployment,not cluster and not slow,nice -n 19 $(SIMULATE_FRESH))

test-oldest: $(OLDEST)/.ready ## run those tests with the lowest versions that pyproject.toml allows
	$(call at-once,cluster and not slow and not deployment,not cluster and not slow)

test-oldest $(OLDEST)/.ready: VENV = $(OLDEST)

$(OLDEST)/.ready: pyproject.toml
	rm -rf $(OLDEST) && $(PYTHON) -m venv $(OLDEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --resolution lowest-direct -e '.[dev]'
	touch $@

test-all: setup ## run every test of this machine alone, those of `make test` among them
	$(call at-once,cluster and not deployment,not cluster)

test-clusters: setup ## the half of `make test-all` that starts clusters
	$(CLUSTERS) "cluster and not deployment"

test-others: setup ## the other half of `make test-all`
	$(OTHERS) "not cluster"

deployment-test: setup ## run trials on Dask deployments, beside tracking servers that end, and for longer than their nodes may live
	$(BIN)/python -m pytest -m deployment

examples: setup fashion-data ## solve each example problem, and compare with its reference
	$(BIN)/python -m examples all

wordnet: setup ## L1-logistic regression on the glosses of WordNet, which Debian packages: 118,000 examples of 34,000 words
	@test -f /usr/share/wordnet/data.noun || { apt-get update -qq && apt-get install -y -qq --no-install-recommends wordnet-base; }
	mkdir -p build
	$(BIN)/python -m examples.wordnet /usr/share/wordnet build/wordnet.svm
	$(BIN)/python -m examples l1_logistic --data build/wordnet.svm

examples-large: setup fashion-data ## the same at their large sizes: some minutes each
	$(BIN)/python -m examples all --size large

replicate: setup fashion-data ## repeat experiments of two papers and judge their claims: the first on virtual time, the second in short
	$(BIN)/dps run replicate/ttf
	$(BIN)/dps run replicate/ftps --set 'seeds=[0, 1, 2, 3]' --set training.updates=750

framework: setup ## the shapes of the first parameter-server papers: staleness, scaling, filters, elasticity
	for each in staleness scaling filters studies/pull-filters elastic; do $(BIN)/dps run $$each || exit; done

shapes: setup ## the same on virtual time, on the framework's own problems: the grids of docs/research/shapes.md
	$(BIN)/dps run staleness --set cluster.kind=virtual --set experiment=staleness-virtual
	for each in saturation problems-l1-workers problems-l1-delays problems-rica-workers problems-rica-delays \
		problems-rica-filters; do $(BIN)/dps run studies/$$each || exit; done

frontier: setup ## who wins when, on virtual time: the grids of docs/research/who-wins-when.md
	for each in explore interval $(addprefix studies/,frontier frontier-workers frontier-size frontier-all frontier-layers \
		frontier-stores frontier-faults frontier-everywhere frontier-model frontier-profile partial partial-small ring); do \
		$(BIN)/dps run $$each || exit; done

torch: $(VENV)/.torch ## install torch as well, a CPU build of it where pip knows of one

$(VENV)/.torch: $(READY) requirements-torch.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.lock
	touch $@

torch-test: torch ## run the tests that need torch
	$(BIN)/python -m pytest -m torch

jax: $(VENV)/.jax ## install JAX as well, for the page that shows a model in it

$(VENV)/.jax: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[jax]'
	touch $@

# Slurm is taken from Debian, where that is what runs and apt-get may be used.
slurm: $(VENV)/.slurm ## install what the tests on Slurm need

$(VENV)/.slurm: $(READY)
	{ command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[jobqueue]'
	touch $@

slurm-test: slurm ## run clusters of jobs on a real Slurm of two partitions, started for it; as root
	tests/slurm/run $(BIN)/python -m pytest -m slurm

# Chromium and its driver are taken from Debian, where that is what runs and apt-get may be used.
browser: $(VENV)/.browser ## install what the tests of pages in a browser need

$(VENV)/.browser: $(READY)
	{ command -v chromium && command -v chromedriver; } >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[browser,dashboard]'
	touch $@

browser-test: browser ## open the report and MLflow in a real browser
	$(BIN)/python -m pytest -m browser

docs-tools: $(VENV)/.docs ## install what the documentation is built with

$(VENV)/.docs: $(READY) requirements-docs.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	touch $@

docs: docs-tools ## build the documentation into build/site; any warning fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html; to search in it: $(BIN)/python -m http.server -b 127.0.0.1 -d build/site"

lint: setup ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## check types
	$(BIN)/mypy

build: setup ## make the wheel and the source distribution in build/dist
	$(BIN)/python -m build --outdir build/dist .

lock: ## bring requirements.lock up to the newest releases
	rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	{ sed -n '/^#/p' requirements.lock; $(VENV)-lock/bin/python -m pip freeze --exclude dps; } > requirements.new
	mv requirements.new requirements.lock && rm -rf $(VENV)-lock

ui: setup ## open the MLflow UI on loopback
	$(BIN)/dps ui

report: setup ## write results/demo/report.html again, from the records
	$(BIN)/dps report demo

bench: setup ## time push and pull beside raw TCP, shared memory, a plain Dask actor and what else is installed
	$(BIN)/python -m benchmarks transport

bench-throughput: setup ## count gradients per second against workers and shards
	$(BIN)/python -m benchmarks transport --throughput

bench-recovery: setup ## time recoveries from real faults, and what each strategy costs without any
	$(BIN)/python -m benchmarks recovery

bench-elastic: setup ## time how long a training is held up by shards that move between servers
	$(BIN)/python -m benchmarks elastic

bench-measuring: setup ## compare updates per second with everything recorded and evaluated, and with neither
	$(BIN)/python -m benchmarks measuring

bench-sparse: setup ## count keys per second of sparse tables, beside a dictionary of arrays and Ray actors
	$(BIN)/python -m benchmarks sparse

bench-torch: torch ## train modules of torch beside the bare loop of the same module
	$(BIN)/python -m benchmarks torch

bench-baselines: setup ## train beside a single process, and Ray, torch RPC and torchft where installed, and kill the server of each
	$(BIN)/python -m benchmarks baselines --seeds 5

bench-examples: setup ## count the examples that each of these systems loses or repeats if a process is killed
	$(BIN)/python -m benchmarks examples --seeds 3

simulate: setup ## run SCHEDULES (10000) random schedules of faults of the series SEED (0) on virtual time; REPLAY='chain(2):12' repeats one
	$(BIN)/python -m tests.simulator $(if $(REPLAY),--replay '$(REPLAY)',--schedules $(SCHEDULES) --seed $(SEED))

mutants: setup ## run schedules until every deliberately broken variant of the protocol is caught
	$(BIN)/python -m tests.simulator --mutants

simulate-fresh: setup ## run some hundred schedules of a series that is the present commit's, about a minute
	$(SIMULATE_FRESH)

# Virtual time is first: it takes seconds, and what is wrong with a configuration is found there.
validate: setup ## run EXPERIMENT (demo) on virtual time with PROFILE (laptop) and on real processes, and compare the two
	$(BIN)/dps run $(EXPERIMENT) --virtual --set cluster.profile=$(PROFILE)
	$(BIN)/dps run $(EXPERIMENT)
	$(BIN)/dps compare $(EXPERIMENT) $(EXPERIMENT)-virtual

soak: setup ## kill and pause nodes at random for SOAK_MINUTES (30), and check every promise
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED)

clean: ## remove results, tracking store, caches and .venv
	rm -rf .venv* results build *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find mlruns -mindepth 1 ! -name .gitignore -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
