# make demo       train the digits on two local ranks
# make lab        the demo on four hosts at 200 Mbit/s (root, Linux); twice the epochs, since of
#                 twice the ranks each makes half the steps in one
# make test       the quick set of the tests: every kind of case, not every combination
# make test-all   all tests, but for those on a Spark cluster
# make test-rest  those that `make test` leaves out, but for what takes minutes, each or with its like
# make test-gpu   what needs a GPU (one is enough), and lost ranks with models on it
# make test-spark what needs a Spark cluster, which it starts here (needs Java 17: as with
#                 apt-get install openjdk-17-jre-headless)
# make test-trainers Lightning, Accelerate and other trainers, on two ranks, and checkpoints in a
#                 server of S3, in an environment of their own (TRAINERS='-m "not minutes"' leaves
#                 the longest out)
# make test-browser pages in Chromium, taken from PATH (on Debian: apt-get install chromium)
# make test-proof twelve faults in the lab (root, Linux), 200 random models by the day's seed
#                 (SHOAL_FUZZ_SEED=N repeats one), the documentation, pages in Chromium: minutes
# make lint       ruff and mypy
# make docs       the documentation as a site, in build/site
# make release    wheel and source archive in dist/, tried from an empty folder
# make matrix     the wheel with the oldest and the newest torch, on PYTHONS: gigabytes, minutes
#
# Each sets up what it needs in .venv first. PYTHON picks the interpreter (3.11 or newer).

PYTHON ?= python3
BIN := .venv/bin

# three, also on two cores: many tests wait for processes and deadlines
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# What failed beside others runs once more, alone: a deadline may have passed while they had the
# cores. What fails again fails the target.
AGAIN := --last-failed --last-failed-no-failures none --maxfail 20
ALONE := $(BIN)/python -m pytest $(AGAIN)
AT_TRAINERS := HF_HUB_OFFLINE=1 build/trainers/bin/python -m pytest tests/trainers tests/checkpoint/test_s3.py

# Tests start a hundred programs: each compiles the library anew where none may keep it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-rest test-gpu test-spark test-trainers test-browser test-proof java lint docs release matrix lab clean

demo: .venv/ready
	$(BIN)/shoal train examples/digits.py --ranks 2

test: .venv/ready
	$(PYTEST) -m "not slow" || $(ALONE)

test-all: .venv/ready
	$(PYTEST) -m "not spark" || $(ALONE)

test-rest: .venv/ready
	$(PYTEST) -m "slow and not minutes and not spark" || $(ALONE)

test-gpu: .venv/ready
	SHOAL_TEST_DEVICE=cuda $(PYTEST) -m "not slow" tests/gpu tests/faults/test_lost_ranks.py

test-spark: java .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,spark]'
	$(BIN)/python -m pytest -m spark tests/tools/spark || $(ALONE)

test-trainers: build/trainers/ready
	$(AT_TRAINERS) $(TRAINERS) || $(AT_TRAINERS) $(AGAIN)

test-browser: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,browser]'
	$(BIN)/python -m pytest tests/tools/report/test_browser.py

test-proof: .venv/ready docs test-browser
	$(BIN)/python benchmarks/faults.py --chosen
	$(BIN)/python tests/equivalence/random_terms.py --cases 200 --day

java:
	@command -v java >/dev/null || test -x "$$JAVA_HOME/bin/java" || { echo "Spark needs Java 17 or newer: \
	apt-get install openjdk-17-jre-headless, or set JAVA_HOME"; exit 1; }

lint: .venv/ready
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: .venv/ready
	$(BIN)/pip install --quiet build
	$(BIN)/python tests/release.py

PYTHONS ?= python3.11 python3.13
TORCHES ?= 2.8.0 2.15.0
LOWEST ?= --lowest

matrix:
	$(PYTHON) tests/matrix.py --python $(PYTHONS) --torch $(TORCHES) $(LOWEST)

lab: .venv/ready
	$(BIN)/shoal lab --hosts 4 --rate 200mbit -- $(BIN)/shoal train examples/digits.py --epochs 24

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer: make PYTHON=python3.11"'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# It sees all of .venv, and has the trainers beside it: none of them brings another torch.
build/trainers/ready: constraints-trainers.txt .venv/ready
	$(BIN)/python -m venv build/trainers
	build/trainers/bin/pip install --quiet --no-deps --requirement constraints-trainers.txt
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > "$$(build/trainers/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
