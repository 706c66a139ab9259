# What can be done here: `make help`.
SHELL := /bin/bash
.DEFAULT_GOAL := help

ENVIRONMENTS := python3 services/environments.py
ENVS := .envs
STACK := $(ENVS)/stack/bin/python -m services.stack
TOOLS := $(ENVS)/tests/bin
RUN_IN := tests/run_in.py
COMPOSE := docker compose
# A build is named by VERSION, also where a swap has put another image in its place.
UNPINNED := SGLANG_IMAGE= PRODUCER_IMAGE= TOKENIZER_IMAGE= TRAINER_IMAGE=

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

.PHONY: bench-train
bench-train: envs ## Measure a training step against SpecForge's and speculators' own code (ARGUMENTS: --shapes, --rounds)
	tests/benchmarks/peers/install.sh
	PYTHONPATH=. $(ENVS)/trainer/bin/python -m tests.benchmarks.bench_train $(ARGUMENTS)

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

.PHONY: bench-objectives
bench-objectives: envs materials ## Train with each term of the loss on the same data and compare acceptance (ARGUMENTS)
	$(ENVS)/trainer/bin/python -m tests.benchmarks.bench_objectives $(ARGUMENTS)

.PHONY: test-services
test-services: ## Tests on a real embedded Redis and the real SGLang server
	$(ENVS)/producer/bin/python $(RUN_IN) tests/services

.PHONY: test-chaos
test-chaos: ## Kill workers, servers and Redis while a run goes on, and count what came of every prompt
	$(ENVS)/producer/bin/python $(RUN_IN) tests/chaos

.PHONY: kill-merge
kill-merge: envs ## Kill a merge with -9 at a hundred moments: the base untouched, the dataset whole or absent
	PYTHONPATH=. $(ENVS)/tokenizer/bin/python -m tests.chaos.kill_merge $(ARGUMENTS)

.PHONY: kill-training
kill-training: envs tools ## Kill a training run with -9 twenty times, and compare its end with one never killed
	$(ENVS)/trainer/bin/python $(RUN_IN) -q -s tests/benchmarks/kill_training.py

.PHONY: bench-generate
bench-generate: envs tools ## Measure generation: slot use, producer CPU, the reference run's 193,010 prompts
	$(ENVS)/producer/bin/python $(RUN_IN) -q -s tests/benchmarks/bench_generate.py

.PHONY: run-real
run-real: envs materials ## Answer a thousand real prompts on the real SGLang, killing a producer in the middle (half an hour)
	PYTHONPATH=. $(ENVS)/stack/bin/python -m tests.benchmarks.real_run

.PHONY: binaries
binaries:
	@tests/monitoring/binaries.sh var/monitoring

.PHONY: test-rules
test-rules: binaries ## promtool on Prometheus' configuration, rules and their tests
	var/monitoring/promtool check config monitoring/prometheus/prometheus.yml
	var/monitoring/promtool test rules monitoring/prometheus/tests/*.yml

.PHONY: test-monitoring
test-monitoring: envs tools test-rules ## Panels and alerts on the Prometheus of a live stack: each shows data, fires and clears
	$(ENVS)/producer/bin/python $(RUN_IN) tests/monitoring

.PHONY: bench-monitoring
bench-monitoring: envs tools ## Measure what watching costs: a scrape, series of an 8-card stack, processor time
	$(ENVS)/producer/bin/python $(RUN_IN) -q -s tests/benchmarks/bench_monitoring.py

.PHONY: pictures
pictures: envs materials binaries ## Watch a real run, draw the dashboards into docs/images and list every panel's values
	PYTHONPATH=. $(ENVS)/stack/bin/python -m tests.monitoring.watched_run docs/images docs/panels.md
	PYTHONPATH=. $(ENVS)/stack/bin/python -m tests.monitoring.written_cards docs/images

.PHONY: test-stack
test-stack: envs tools materials ## Build the cpu images, run the pipeline in containers, and kill, scale, swap and restore it
	$(ENVS)/stack/bin/python $(RUN_IN) tests/stack

.PHONY: test-trainer-swap
test-trainer-swap: envs tools ## Swap the trainer to OTHER_TRAINER_IMAGE=dflash-stack/trainer:cu128-dev and back while it trains
	$(ENVS)/stack/bin/python $(RUN_IN) -s tests/stack/test_trainer_swap.py

.PHONY: test-engine-restart
test-engine-restart: envs tools materials ## Restart this machine's Docker engine, with nothing else in it, while a run generates
	$(ENVS)/stack/bin/python $(RUN_IN) tests/stack/engine_restart.py

.PHONY: test-toolchain
test-toolchain: envs tools ## Build kernels with the CUDA compiler that images/sglang locks, whole and broken (0.3 GB of wheels)
	$(ENVS)/stack/bin/python $(RUN_IN) tests/cuda/test_toolchain.py

.PHONY: test-production-image
test-production-image: envs tools materials ## Build SGLang's cu130 image with its real CUDA wheels and serve in it on the CPU (25 GB of disk)
	$(ENVS)/stack/bin/python $(RUN_IN) -s tests/cuda/test_production_image.py

.PHONY: bench-prompts
bench-prompts: envs materials ## Measure preparing prompts: rows a second, peak memory (ARGUMENTS=--tenth: the table)
	PYTHONPATH=. $(ENVS)/tokenizer/bin/python -m tests.benchmarks.bench_prompts $(ARGUMENTS)

.PHONY: lint
lint: envs tools ## ruff, mypy, import-linter, shellcheck, hadolint, dclint
	tests/lint.sh

.PHONY: lock
lock: tools ## Renew the hashed locks
	python3 images/lock.py

.PHONY: build
build: ## Build the images of the stack that .env names
	$(UNPINNED) $(COMPOSE) --profile '*' build

.PHONY: up
up: ## Look at this host, bring the stack of .env up, and wait until it is healthy
	@$(STACK) doctor
	$(COMPOSE) up --detach --wait --no-build

.PHONY: down
down: ## Take the stack down; its volumes stay
	$(COMPOSE) --profile '*' down

.PHONY: scale
scale: ## Run PRODUCERS=N producers, from now on
	@$(STACK) scale $(PRODUCERS)

.PHONY: logs
logs: ## Follow the logs of the stack, or of SERVICE=NAME
	$(COMPOSE) logs --follow --tail 100 $(SERVICE)

.PHONY: backup
backup: ## Copy all runs to a new folder in var/backups, while the stack goes on
	@$(STACK) backup

.PHONY: restore
restore: ## Put the runs of BACKUP=FOLDER back; the stack is down, and there are no runs
	@$(STACK) restore $(BACKUP)

.PHONY: swap
swap: ## Put another image in a service's place: SERVICE=trainer IMAGE=cu130 (a variant, a tag or a whole name)
	@$(STACK) swap $(SERVICE) $(IMAGE)

.PHONY: rollback
rollback: ## Go back to the image before the last swap: SERVICE=trainer
	@$(STACK) rollback $(SERVICE)

.PHONY: up-cpu
up-cpu: materials ## Bring the CPU stack up with the demo's model; writes .env if there is none
	@$(STACK) stack-files
	@$(MAKE) build up

.PHONY: down-cpu
down-cpu: down ## The same as down

.PHONY: clean
clean: ## Remove what the demo and the tests wrote; the environments stay
	rm -rf var
