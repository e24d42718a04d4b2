# One command each; everything but `setup` calls `setup` first, which does nothing when it is up to date.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.setup-done

.PHONY: setup compile demo example-bank test test-all test-full test-optimized soak fuzz differential model simulate bench mutants lock behaviours conformance clients \
	reference docs docs-serve clean

setup: $(STAMP)  ## make .venv with the locked packages, compile the row loops in C, and check that Java is there
	@$(BIN)/python tools/compile.py --c-only || true
	@$(BIN)/python tools/find_java.py || true

$(STAMP): requirements.lock requirements-build.lock pyproject.toml $(wildcard packages/*/pyproject.toml) tools/make_venv.sh
	@tools/make_venv.sh $(VENV)
	@touch $(STAMP)

compile: setup  ## compile the hot modules with mypyc; an edit of a source switches them off
	$(BIN)/python tools/compile.py

demo: setup  ## real flights, real faults, Spark, and a count of lost and doubled records
	$(BIN)/oncelog demo

example-bank: setup  ## a bank whose teller is killed repeatedly; every transfer is booked once
	$(BIN)/python examples/bank.py

# Tests replace methods of classes, which callers compiled by mypyc do not see. The row loops in C take part, except
# under -OO and in mutation testing, which run the sources.
test test-full soak: export ONCELOG_PURE_PYTHON := mypyc
test-optimized mutants: export ONCELOG_PURE_PYTHON := 1
# The tests start hundreds of processes. Where this variable is set, each of them would compile all sources again.
test test-full test-optimized soak mutants simulate: export PYTHONDONTWRITEBYTECODE :=

PYTEST_OPTIONS ?=
test: setup  ## style, types, and the quick tests (docs/internals/testing.md); PYTEST_OPTIONS="--order-seed=7"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m quick -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

test-full: setup  ## tests that need Apache Kafka, other languages, clusters, kills or a browser
	$(BIN)/pytest -m "full or property" -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

test-all: test test-full test-optimized  ## all tests except the long runs

test-optimized: setup  ## tests of rules, wire, log, broker and clients under python -OO
	PYTHONOPTIMIZE=2 $(BIN)/pytest -n auto --dist loadfile tests/rules tests/wire tests/log tests/broker tests/client \
		tests/faults/test_faults_stories.py tests/test_errors.py $(PYTEST_OPTIONS)

soak: setup  ## the long runs that `make test-all` leaves out
	$(BIN)/pytest -m soak --timeout=3600

fuzz: setup  ## search for inputs that break a parser, a minute for each parser (SECONDS=60)
	$(BIN)/python tools/fuzz.py --seconds $(or $(SECONDS),60)

SEQUENCES ?= 0..500
differential: setup  ## compare the responses of our broker and Apache Kafka to random requests; SEQUENCES=A..B
	$(BIN)/python tools/differential_fuzzer.py --sequences $(SEQUENCES)

model: setup  ## check the models of the protocol (docs/model) exhaustively; needs spin and gcc
	$(BIN)/python tools/model.py

SEEDS ?= 200
simulate: setup  ## run the real broker and clients against simulated faults; SEEDS=A..B or a number
	$(BIN)/oncelog simulate --seeds $(SEEDS)

bench: setup  ## measure beside Apache Kafka (for hours), and rewrite docs/benchmarks.md
	$(BIN)/oncelog bench all

mutants: setup  ## mutation testing: list changed operators that no quick test notices; MODULES=... SECONDS=...
	$(BIN)/python tools/mutation.py $(or $(MODULES),rules) --seconds $(or $(SECONDS),1800) --write

conformance: setup  ## run `oncelog conform` on several brokers (about 20 minutes), and write docs/conformance.md
	$(BIN)/python tools/conformance.py --run

clients: setup  ## check what Kafka clients do on the wire, and write the matrix of docs/conformance.md
	$(BIN)/python tools/clients_matrix.py --run
	$(BIN)/python tools/clients_matrix.py --run --kafka

behaviours: setup  ## write docs/behaviours.md from the markers of the tests
	$(BIN)/python tools/behaviours.py

reference: setup  ## write docs/reference and typed_settings.py from the code's tables of settings, commands, metrics, errors and names
	$(BIN)/python tools/typed_settings.py
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/dashboard.py
	$(BIN)/python tools/literature.py

docs: setup  ## build the documentation site in out/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: setup  ## show the documentation site on http://127.0.0.1:8000 while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

COMPILE := uv pip compile --no-header --no-annotate --no-emit-index-url --generate-hashes
lock:  ## solve requirements.lock and requirements-build.lock again (needs uv)
	$(COMPILE) pyproject.toml --all-extras -o requirements.lock
	printf 'editables\nhatchling\nsetuptools\nuv\nwheel\n' | $(COMPILE) - -c requirements.lock -o requirements-build.lock

clean:  ## remove everything that make can build again
	rm -rf $(VENV) out dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
