# The main commands are make demo and make test. Both install their dependencies in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST ?= $(BIN)/pytest
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
SERVING := $(VENV)/.serving
INSTALLED := $(VENV)/.installed

.PHONY: setup demo run test checks short test-all test-browser screenshots supply release lock test-faults \
        container-check fuzz soak bench-serving bench-accuracy bench-open-set bench-gallery \
        bench-gpu clean

# Dependencies of the server, and the packages with the demo's photos. Those come without dependencies, because the demo
# does not import them (docs/decisions.md, 2 and 42). Bytecode is compiled at the first import, which saves 70 MB.
$(SERVING): pyproject.toml constraints.txt requirements/serve.txt docker/unused.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile --no-deps --require-hashes -r requirements/serve.txt
	$(PIP) install --no-compile --constraint constraints.txt --no-deps scikit-image insightface
	$(PIP) install --no-compile --constraint constraints.txt -e '.[cpu]'
	@# Without OpenVINO's plugins for other devices and formats, and other large files, as in the image: 140 MB.
	cd $(VENV)/lib/python3*/site-packages && rm -rf $$(grep -E '^(fastapi_offline|onnx|onnxruntime|openvino)/' $(CURDIR)/docker/unused.txt)
	touch $@

setup: $(INSTALLED)

$(INSTALLED): $(SERVING) requirements/dev.txt
	$(PIP) install --no-deps --require-hashes -r requirements/dev.txt
	@# Versions of torch and its dependencies are pinned; their files are not (docs/decisions.md, 42).
	$(PIP) install --constraint constraints.txt -e '.[cpu,postgres,milvus,mqtt,training,demo,dev]'
	touch $@

demo: $(SERVING)
	$(BIN)/kith demo

run: $(SERVING)
	$(BIN)/kith serve

# The static checks run beside the tests, which leave some processor time while they wait.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 checks short

checks: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/oxfmt --check 'service/console/**/*.js' 'tests/**/*.js' 'tests/**/*.mjs'
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/mypy

short: setup
	$(PYTEST) -m "not long" -n 2 --dist loadfile --max-worker-restart 0

# The tests that take long; make test runs the others.
test-all: setup
	$(PYTEST) -m long -n 2 --dist loadfile --max-worker-restart 0 --durations=20

# Tests and screenshots of the console in Chromium: docs/console.md, docs/decisions.md, 43.
test-browser: setup
	@$(BIN)/python -m tests.browser.chromium
	$(PYTEST) tests/browser -n 2 --dist loadfile --max-worker-restart 0

screenshots: setup
	$(BIN)/python -m tests.browser.screenshots

# Check vulnerabilities and licenses, and write a bill of materials of the environment: docs/decisions.md, 42.
supply: setup
	$(BIN)/python -m requirements.check

# Build the files of a release from the last commit in dist: docs/deployment.md.
release: setup
	$(BIN)/python -m requirements.release dist

# Update the hashed requirements after a change of pyproject.toml or constraints.txt.
lock: setup
	UV=$(BIN)/uv requirements/lock

# The fault-injection tests, five times or RUNS, at other instants each time: docs/faults.md.
test-faults: setup
	for run in $$(seq $(or $(RUNS),5)); do $(BIN)/pytest tests/faults || exit 1; done

# Build the image without a Docker engine and test it (as root; lists missing programs): docs/deployment.md.
container-check: setup
	PYTHON=$(BIN)/python docker/check cpu

# Coverage-guided fuzzing with hostile input: docs/faults.md.
fuzz: setup
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10)
	KITH_EXAMPLES=$$(awk 'BEGIN { n = int(20 * $(or $(MINUTES),10)); print (n > 1 ? n : 1) }') $(BIN)/pytest tests/service/api/test_openapi.py

# Soak test: half an hour of mixed load with faults. Shorter: MINUTES=5. Other database: DATABASE=postgresql.
DATABASE ?= sqlite
soak: setup
	$(BIN)/python -m bench.soak --minutes $(or $(MINUTES),30) --database $(DATABASE)

# Two-minute version: ARGUMENTS=--quick
bench-serving: setup
	$(BIN)/python -m bench.serving $(ARGUMENTS)

# PACKS: more packs to compare with the bundled one.
bench-accuracy: setup
	$(BIN)/python -m bench.accuracy $(PACKS)

bench-open-set: setup
	$(BIN)/python -m bench.open_set

bench-gallery: setup
	$(BIN)/python -m bench.gallery

# Uses the current environment, not .venv: docs/scale.md.
bench-gpu:
	$(PYTHON) -m bench.gpu

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache demo-output
