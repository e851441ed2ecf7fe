# The commands of a newcomer (demo, play, test) and of a contributor (check, test, campaign, bench).
# They set up .venv by themselves; PYTHON=/path/to/python3.12 chooses the interpreter it is made with.

PYTHON ?=
ARGS ?=
JOBS ?= 2
BIN := .venv/bin
# Where an image sets this, each process of a demo or a test would compile PyTorch anew, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo play test check style campaign lock bench proof-gpu conformance docs dist clean
.DEFAULT_GOAL := demo

# Two twins train, one is killed twice, and both end in the same state; half a minute.
demo: .venv/.demo
	@$(BIN)/python tools/demo.py $(ARGS)

# A longer training, to stop and start by hand; ARGS=--again begins anew.
# A signal reaches this shell, too: then the training has said what there is to say, and make need not.
play: .venv/.demo
	@trap 'signalled=1' INT TERM HUP; $(BIN)/python examples/digits.py $(ARGS); status=$$?; \
	[ "$$signalled" ] || exit $$status

# The gate: the same verdict on any day (tests/gate.py).
# mypy runs beside the tests, as it needs one core for most of a minute; what it finds is printed last.
test: style
	@$(BIN)/mypy --no-error-summary >.venv/mypy.log 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS); tests=$$?; \
	wait $$types || { cat .venv/mypy.log; exit 1; }; exit $$tests

check: style
	@$(BIN)/mypy --no-error-summary

style: .venv/.test
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .

# What is random, timed, long or of this machine: MINUTES=20 SEED=123 ONLY=tests/laws.  It reports, adds a line to
# docs/campaigns.md, and keeps no commit out.
campaign: .venv/.campaign
	@-$(BIN)/python tools/lock.py --dry-run
	@$(BIN)/python tools/campaign.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
	$(if $(ONLY),--only "$(ONLY)") -n $(JOBS) --dist worksteal $(ARGS)

# Locks the newest versions that pyproject.toml allows: writes requirements/, and prints which versions changed.
lock: .venv/.demo
	@$(BIN)/python tools/lock.py $(ARGS)

# All benchmarks, half an hour on a machine with nothing else to do; writes docs/benchmarks.md.  PEERS=1 measures
# other libraries, too; ARGS="--only steps data" measures these parts anew.
bench: .venv/.test $(if $(PEERS),.venv/.peers)
	@$(BIN)/python bench/suite.py $(if $(PEERS),--peers .venv/peers/bin/python) $(ARGS)

# Ten minutes on a machine with CUDA; it writes a table with the device's name.  ARGS="--device cpu" tries the program.
proof-gpu: .venv/.demo
	@$(BIN)/python bench/proof_gpu.py $(ARGS)

# Kills, damages and signals for every set-up of conformance/; writes docs/conformance.md.  An hour or so; ARGS="--only NAME" does one.
conformance: .venv/.peers
	@.venv/peers/bin/python tools/conformance_page.py $(ARGS)

# The site, in site/; ARGS=FOLDER builds it elsewhere.  To look at it: python -m http.server -d site
docs: .venv/.docs
	@.venv/docs/bin/python tools/build_site.py $(ARGS)

# The source distribution and the wheel, which is built from it, in dist/.
dist: .venv/.dist
	@rm -rf dist
	@.venv/dist/bin/python -m build --no-isolation --outdir dist . $(ARGS)

clean:
	rm -rf .venv dist site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.demo .venv/.test .venv/.campaign: .venv/.%: pyproject.toml constraints.txt $(wildcard requirements/*.txt)
	@PYTHON="$(PYTHON)" sh tools/setup.sh $*
	@touch $@

# Tools that are not installed beside the project have an environment each.
.venv/.dist: tools/setup.sh
	@PYTHON="$(PYTHON)" sh tools/setup.sh --beside dist build "hatchling>=1.27,<2"
	@touch $@

.venv/.docs: tools/setup.sh
	@PYTHON="$(PYTHON)" sh tools/setup.sh --beside docs "zensical>=0.0.73,<1" "griffelib>=2,<3"
	@touch $@

.venv/.peers: tools/setup.sh conformance/requirements.txt bench/requirements.txt constraints.txt
	@PYTHON="$(PYTHON)" sh tools/setup.sh --beside peers -r conformance/requirements.txt -r bench/requirements.txt \
	-c constraints.txt -e .
	@touch $@

# Where pip finds a torch without CUDA, but torchvision only with it, torchvision cannot be imported: then torch with CUDA
# (=== takes no build 2.13.0+cpu), 4 GB more.
.venv/.recipes: tools/setup.sh docs/recipes/requirements.txt constraints.txt
	@PYTHON="$(PYTHON)" sh tools/setup.sh --beside recipes -r docs/recipes/requirements.txt -c constraints.txt -e .
	@.venv/recipes/bin/python -c "import torchvision" 2>/dev/null || \
	.venv/recipes/bin/python -m pip install -qq --disable-pip-version-check "$$(sed 's/==/===/' constraints.txt)"
	@touch $@
