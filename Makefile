# make demo   builds .venv and trains and prunes a network on real digits
# make test   builds .venv and runs the tests
# Extra pip options choose another build of torch, for example a CPU one:
#   make demo PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
PIP_OPTIONS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint bench clean

demo: $(INSTALLED)
	$(BIN)/sparsecomp fit --config configs/experiment/digits_similarity.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_OPTIONS) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv
