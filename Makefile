# Two commands matter: make course, make test. README.md has the same as plain pip lines.
PYTHON ?= python3
# Where torch comes from. PyPI's Linux wheel carries CUDA (several GB); for the CPU build:
#   make course TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

BIN := .venv/bin
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=120 -p no:cacheprovider
# Two workers of one thread each beat one of two; cells of a notebook must stay on one worker.
PARALLEL := -n 2 --dist loadfile
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: course test check browser nightly notebooks labs figures clean

# With a CPU build of torch the exact versions of constraints.txt are installed, those the tests run on. A CUDA build
# pins its own triton, so there the ranges of pyproject.toml decide.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	if $(BIN)/python -c "import torch, sys; sys.exit(torch.version.cuda is not None)"; then \
		$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"; \
	else \
		$(BIN)/python -m pip install -q -e ".[dev]"; \
	fi
	touch $@

course: .venv/.installed
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" chapters/00_start_here.ipynb

test: .venv/.installed lint
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) --ignore=tests/browser tests
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(NBVAL) chapters solutions
	$(MAKE) browser

# JupyterLab in a real Chromium. Apart from the rest, since it waits for a page and a busy machine keeps it waiting.
browser: .venv/.installed
	$(ONE_THREAD) $(BIN)/python -m pytest -rs tests/browser

# The fast subset: no notebook, no benchmark, no real model.
check: .venv/.installed lint
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -m "not smollm2" --ignore=tests/notebooks --ignore=tests/bench --ignore=tests/browser tests

.PHONY: lint
lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

nightly: .venv/.installed
	$(BIN)/python -m pytest -m nightly tests

# Run every chapter and every lab's solution and store their outputs, ready to commit.
notebooks: .venv/.installed
	$(BIN)/python -m minillm.course.notebooks chapters/*.ipynb solutions/*.ipynb
	$(MAKE) labs

# Labs are generated: solutions without the solutions.
labs: .venv/.installed
	$(BIN)/python -m minillm.course.labs

figures: .venv/.installed
	set -e; for script in figures/*.py; do $(BIN)/python $$script; done

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .cache
