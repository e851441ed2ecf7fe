# The commands of a newcomer (demo, play, test) and of a contributor (check, test, torture, bench).
# They set up .venv by themselves; PYTHON=/path/to/python3.12 chooses the interpreter it is made with.

PYTHON ?=
ARGS ?=
JOBS ?= 2
BIN := .venv/bin

.PHONY: demo play test test-all test-long check torture bench proof-gpu clean
.DEFAULT_GOAL := demo

# Two twins train, one is killed twice, and both end in the same state; half a minute.
demo: .venv/.demo
	@$(BIN)/python tools/demo.py $(ARGS)

# A longer training, to stop and start by hand; ARGS=--again begins anew.
# A signal reaches this shell, too: then the training has said what there is to say, and make need not.
play: .venv/.demo
	@trap 'signalled=1' INT TERM HUP; $(BIN)/python examples/digits.py $(ARGS); status=$$?; \
	[ "$$signalled" ] || exit $$status

test: check
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not (long or torture)" $(ARGS)

test-all: test test-long

# What test-all adds to test, and the cases that took their turn there: at midnight none falls between the two.
test-long: .venv/.test
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "(long or in_turn) and not torture" $(ARGS)

check: .venv/.test
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy --no-error-summary

# SEED=123 repeats a campaign whose seed was printed.
torture: .venv/.test
	@$(if $(SEED),EVERSTEP_SEED=$(SEED)) $(BIN)/python -m pytest -q -m torture $(ARGS)

bench: .venv/.test
	@$(BIN)/python bench/overhead.py $(ARGS)

# Ten minutes on a machine with CUDA; it writes a table with the device's name.  ARGS="--device cpu" tries the program.
proof-gpu: .venv/.demo
	@$(BIN)/python bench/proof_gpu.py $(ARGS)

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.demo .venv/.test: .venv/.%: pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" sh tools/setup.sh $*
	@touch $@
