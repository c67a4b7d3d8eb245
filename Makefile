# All set-up in one place. It needs Python 3.11 or newer and make; `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
STEPS  := lint unit ranks kernel browser drills nbval

# The other systems (docs/systems.md) have an environment of their own, which sees all of the first one: torch is installed once.
EXTRAS  := ray,spark,deepspeed,fairscale,megatron,mpi
SYSTEMS := .venv-systems
SPY     := $(SYSTEMS)/bin/python
SSTAMP  := $(SYSTEMS)/.installed

# Cells tagged needs_gpu and tests marked gpu are for tests/gpu_check.sh.
PYTEST := $(PY) -m pytest -q -m "not gpu and not needs_gpu"
# ddplab's own time-out (60 s) must be the shorter one: nbval would leave the ranks behind.
NBVAL  := --nbval --nbval-current-env --nbval-cell-timeout=300 --nbval-kernel-startup-timeout=120 \
          --nbval-sanitize-with tests/nbval_sanitize.cfg

# $(call apt,PACKAGE) installs it, if this user may.
apt = { if [ "$$(id -u)" -eq 0 ]; then sudo=; else sudo='sudo -n'; fi; \
  $$sudo apt-get update && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y $(1); } >/dev/null 2>&1 </dev/null
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install systems demo lab test chromium java notebooks exercises bench gpu clean $(STEPS)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install the pinned versions (each target does it by itself)

# The stamp is written last: an install that was cut short is done again.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'ddplab needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	    echo '$(PYTHON) cannot make a virtual environment (on Debian: apt install python3-venv)' >&2; exit 1; }; }
	@echo 'installing into $(VENV): minutes and about 6 GB the first time, seconds after that'
	@$(PY) $(PIP) -e '.[notebook,dev]'
	@touch $@

systems: $(SSTAMP) java ## the other systems in .venv-systems: install them, run their tests and notebook 12 with them
	@PATH="$$PWD/$(SYSTEMS)/bin:$$PATH" $(SPY) -m pytest -q -rs tests/systems
	@$(if $(wildcard notebooks/12_*.ipynb),PATH="$$PWD/$(SYSTEMS)/bin:$$PATH" $(SPY) -m pytest -q $(NBVAL) notebooks/12_*.ipynb)
	@echo 'make systems: all passed. In JupyterLab (make lab), take the kernel "Python with the other systems"'

# What cannot be installed here is left out: its tests are skipped (in CI they fail), its recorded result is shown.
$(SSTAMP): $(STAMP)
	@rm -f $@
	@$(PY) -m venv --without-pip $(SYSTEMS)
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >"$$($(SPY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@echo 'installing into $(SYSTEMS): a minute or two and about 1.2 GB the first time, seconds after that'
	@$(SPY) $(PIP) -e '.[$(EXTRAS)]' || for extra in $$(echo $(EXTRAS) | tr , ' '); do \
	  $(SPY) $(PIP) -e ".[$$extra]" || echo "the extra $$extra cannot be installed here" >&2; done
	@$(SPY) -m ipykernel install --prefix $(VENV) --name systems --display-name 'Python with the other systems' >/dev/null 2>&1
	@touch $@

demo: $(STAMP) ## run the first training notebook on 4 ranks; show what each rank did
	@$(PY) -m ddplab demo

# Jupyter refuses to run as root unless told that this is meant.
lab: $(STAMP) ## open JupyterLab on the notebooks
	@exec $(PY) -m jupyterlab --ServerApp.root_dir=notebooks $$(test "$$(id -u)" -ne 0 || echo --allow-root)

test: $(STAMP) ## lint and types, unit tests, rank tests, kernel and browser tests, every notebook; stops at the first failure
	@for step in $(STEPS); do \
	  printf '\n== make %s\n' $$step; \
	  $(MAKE) --no-print-directory $$step || { printf '\nmake test stopped at: make %s\n' $$step >&2; exit 1; }; \
	done; printf '\nmake test: %s: all passed\n' '$(STEPS)'

lint: $(STAMP) ## ruff and mypy
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --quiet --check . || { $(PY) -m ruff format --check .; exit 1; }
	@$(PY) -m mypy

unit: $(STAMP) ## tests that start no process, and the examples of the docstrings
	@$(PYTEST) --doctest-modules ddplab tests/unit --ignore=ddplab/launcher.py --ignore=ddplab/__main__.py

ranks: $(STAMP) ## tests with real ranks; those that look at nothing else, two at a time
	@$(PYTEST) -n 2 tests/ranks/lessons
	@$(PYTEST) --doctest-modules ddplab/launcher.py tests/ranks --ignore=tests/ranks/lessons

kernel: $(STAMP) ## tests with real Jupyter kernels
	@$(if $(wildcard tests/kernel/test_*.py),$(PYTEST) tests/kernel,echo 'no tests/kernel')

browser: $(STAMP) ## tests with a real JupyterLab in a real browser; skipped, and says so, where there is no Chromium
	@$(if $(wildcard tests/browser/test_*.py),$(PYTEST) -rs tests/browser,echo 'no tests/browser')

chromium: ## install Chromium, if there is none and this user may use apt-get
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	$(call apt,chromium) || echo 'Chromium could not be installed: make browser will skip its tests' >&2

java: ## install Java for Spark, if there is none and this user may use apt-get
	@command -v java >/dev/null || $(call apt,default-jre-headless) || \
	  echo 'Java could not be installed: Spark is skipped' >&2

drills: $(STAMP) ## bad days drawn at random; N=1000 for more, N=1 SEED=17 for drill 17 alone
	@DDPLAB_DRILLS=$(N) DDPLAB_DRILLS_SEED=$(SEED) $(PYTEST) tests/drills

nbval: $(STAMP) ## run every notebook and compare what it prints with what is committed
	@$(if $(wildcard notebooks/*.ipynb),$(PYTEST) $(NBVAL) $(wildcard notebooks/*.ipynb),echo 'no notebooks')

notebooks: $(STAMP) ## execute every notebook and write it back in its one canonical form
	@$(PY) tools/notebooks.py

exercises: $(STAMP) ## write the learner's edition of the exercises from the one with solutions
	@$(PY) tools/exercises.py

bench: $(STAMP) ## the measurements of tests/benchmarks
	@for file in tests/benchmarks/bench_*.py; do $(PY) $$file || exit 1; done

gpu: $(STAMP) ## the checks that need a GPU
	@PYTHON=$(PY) bash tests/gpu_check.sh

clean: ## remove what was built; .venv stays
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	@find ddplab notebooks tests -name __pycache__ -prune -exec rm -rf {} +
