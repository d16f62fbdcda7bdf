# Two commands matter: make demo, make test. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: setup demo run test test-browser screenshots supply lock test-faults container-check fuzz bench-floor soak \
        bench-memory bench-batching bench-serving bench-accuracy bench-open-set bench-overhead bench-reads \
        bench-overload bench-bulk bench-hygiene bench-transfer bench-fusion bench-gallery bench-gpu bench-scale clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt requirements/dev.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/dev.txt
	@# Of what is left, Kith itself, torch with what it brings, and insightface below, versions are pinned, files are not
	@# (docs/decisions/0042).
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt -e '.[cpu,postgres,milvus,tracing,training,demo,dev]'
	@# Without its dependencies, which would overwrite onnxruntime-gpu and opencv-python-headless (docs/decisions/0002).
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps insightface
	touch $@

demo: setup
	$(BIN)/kith demo

run: setup
	$(BIN)/kith serve

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/pytest

# The console in a real Chromium, and its pictures in docs/images: docs/console.md, docs/decisions/0045.
test-browser: setup
	@$(BIN)/python -m tests.browser.chromium
	$(BIN)/pytest tests/browser

screenshots: setup
	$(BIN)/python -m tests.browser.screenshots

# Known vulnerabilities, licences, and a bill of materials of what setup installed: docs/decisions/0042.
supply: setup
	$(BIN)/python -m requirements.check

# The hashed requirements anew, after pyproject.toml or constraints.txt changed.
lock: setup
	UV=$(BIN)/uv requirements/lock

# The long version of what breaks: docs/faults.md.
test-faults: setup
	KITH_FAULTS=long $(BIN)/pytest tests/faults tests/service/test_check.py

# The image, built without a Docker engine, and put to use (as root; says what is missing): docs/deployment.md.
container-check: setup
	PYTHON=$(BIN)/python docker/check cpu

# Input that means harm, made up from what is known to be read in new ways: docs/security-tests.md.
fuzz: setup
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10)
	KITH_EXAMPLES=$$(awk 'BEGIN { n = int(20 * $(or $(MINUTES),10)); print (n > 1 ? n : 1) }') $(BIN)/pytest tests/service/test_openapi.py

bench-floor: setup
	$(BIN)/python -m bench.floor

# Half an hour of everything at once, with faults: MINUTES=5 for a look, DATABASE=postgresql for the other database.
DATABASE ?= sqlite
soak: setup
	$(BIN)/python -m bench.soak --minutes $(or $(MINUTES),30) --database $(DATABASE)

bench-memory: setup
	$(BIN)/python -m bench.memory

# Two minutes of it: ARGUMENTS=--quick
bench-batching: setup
	$(BIN)/python -m bench.batching

bench-serving: setup
	$(BIN)/python -m bench.serving $(ARGUMENTS)

# PACKS names further packs to put beside the bundled one.
bench-accuracy: setup
	$(BIN)/python -m bench.accuracy $(PACKS)

bench-open-set: setup
	$(BIN)/python -m bench.open_set

bench-overhead: setup
	$(BIN)/python -m bench.overhead

bench-reads: setup
	$(BIN)/python -m bench.reads

bench-overload: setup
	$(BIN)/python -m bench.overload

bench-bulk: setup
	$(BIN)/python -m bench.bulk

bench-hygiene: setup
	$(BIN)/python -m bench.hygiene

bench-transfer: setup
	$(BIN)/python -m bench.transfer

bench-fusion: setup
	$(BIN)/python -m bench.fusion

bench-gallery: setup
	$(BIN)/python -m bench.gallery

# Looks at what is in the environment that runs it: docs/gpu.md.
bench-gpu:
	$(PYTHON) -m bench.gpu

bench-scale: setup
	$(BIN)/python -m bench.scale

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache demo-output
