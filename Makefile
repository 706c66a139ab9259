# What can be done here: `make help`.
SHELL := /bin/bash
.DEFAULT_GOAL := help

ENVIRONMENTS := python3 services/environments.py
ENVS := .envs
STACK := $(ENVS)/stack/bin/python -m services.stack
TOOLS := $(ENVS)/tests/bin
RUN_IN := tests/run_in.py
CPU := docker compose -f compose.cpu.yaml

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: envs ## Run the whole way on this machine's CPU: prompts to a measured drafter
	@$(STACK) demo

.PHONY: envs
envs: ## Make the local environments, one per image, from the images' cpu locks
	@$(ENVIRONMENTS) sglang producer tokenizer trainer stack

.PHONY: tools
tools:
	@$(ENVIRONMENTS) tests

.PHONY: materials
materials: envs ## Put the demo's prompts, target model and existing corpus in place
	@$(STACK) materials

.PHONY: tokenizers
tokenizers: ## Make the real tokenizers and chat templates that tests and benchmarks render with
	@$(ENVS)/tokenizer/bin/python tests/real_tokenizers.py

.PHONY: bench-data
bench-data: envs materials tokenizers ## Measure text to samples, ids to samples and the merge against the peers' own code
	tests/benchmarks/peers/install.sh
	$(ENVS)/tokenizer/bin/python -m tests.benchmarks.bench_data

.PHONY: test
test: envs tools materials test-unit test-parity test-services test-chaos ## Pass the tests: unit, the drafter's parity, services on a real Redis and SGLang, chaos

.PHONY: test-unit
test-unit: tokenizers ## Unit tests, each room's in its own image's environment
	$(ENVS)/trainer/bin/python $(RUN_IN) tests/unit/dflash tests/unit/trainer
	$(ENVS)/tokenizer/bin/python $(RUN_IN) tests/unit/prompts tests/unit/tokenizer tests/unit/chat
	$(ENVS)/producer/bin/python $(RUN_IN) tests/unit/producer
	$(ENVS)/stack/bin/python $(RUN_IN) tests/unit/shared tests/unit/stack tests/unit/images

.PHONY: test-parity
test-parity: ## Compare the drafter with z-lab's, SpecForge's and speculators' own code and with the real SGLang
	$(ENVS)/trainer/bin/python $(RUN_IN) tests/parity

.PHONY: verify
verify: envs tools materials test-parity ## The whole parity chain: the peers, SGLang, the demo's target, and that a broken line is found
	$(ENVS)/trainer/bin/python -m tests.parity.verify_target var/models/SmolLM2-135M-Instruct
	$(ENVS)/trainer/bin/python -m tests.parity.broken_lines

.PHONY: bench-acceptance
bench-acceptance: envs materials ## Train this project's way and SpecForge's on the same data and compare acceptance (ARGUMENTS)
	$(ENVS)/trainer/bin/python -m tests.benchmarks.bench_acceptance $(ARGUMENTS)
	$(ENVS)/stack/bin/python -m tests.benchmarks.plot_acceptance var/bench-acceptance/curves.json

.PHONY: test-services
test-services: ## Tests on a real embedded Redis and the real SGLang server
	$(ENVS)/producer/bin/python $(RUN_IN) tests/services

.PHONY: test-chaos
test-chaos: ## Kill workers, servers and Redis while a run goes on, and count what came of every prompt
	$(ENVS)/producer/bin/python $(RUN_IN) tests/chaos

.PHONY: bench-generate
bench-generate: envs tools ## Measure generation: slot use, producer CPU, the reference run's 193,010 prompts
	$(ENVS)/producer/bin/python $(RUN_IN) -q -s tests/benchmarks/bench_generate.py

.PHONY: test-stack
test-stack: envs tools materials ## Build the cpu images, bring the stack up in containers, and run the pipeline in it
	$(ENVS)/stack/bin/python $(RUN_IN) tests/stack

.PHONY: bench-prompts
bench-prompts: envs materials ## Measure preparing prompts: rows a second, peak memory (ARGUMENTS=--tenth: the table)
	PYTHONPATH=. $(ENVS)/tokenizer/bin/python -m tests.benchmarks.bench_prompts $(ARGUMENTS)

.PHONY: lint
lint: envs tools ## ruff, mypy, import-linter, shellcheck, hadolint
	tests/lint.sh

.PHONY: lock
lock: tools ## Renew the hashed locks
	python3 images/lock.py

.PHONY: up-cpu
up-cpu: materials ## Bring the CPU stack up and wait until it is healthy; writes .env if there is none
	@$(STACK) stack-files
	$(CPU) build
	$(CPU) up --detach --wait

.PHONY: down-cpu
down-cpu: ## Take the CPU stack down; its volumes stay
	$(CPU) down

.PHONY: clean
clean: ## Remove what the demo and the tests wrote; the environments stay
	rm -rf var
