# `make demo` and `make test` are the two to know; the rest is for who works on ddpprobe.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1
# Hundreds of short processes are started, and each of them would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Without `train`, which brings torch: whoever installs the wheel chooses which torch that is.
SBOM_EXTRAS := xarray,dask,pandas,polars,plot,parquet,web,cloud

.PHONY: demo demo-fsdp test test-grid test-faults test-alerts test-frameworks test-models test-versions test-mutants test-gpu \
  test-wheel dist sbom check dashboards docs bench bench-detection bench-baseline clean system-packages

demo: .venv/run.stamp            # train 4 ranks under DDP, plant a NaN, print the verdict
	$(BIN)/python launch/demo.py --wrap ddp

demo-fsdp: .venv/run.stamp       # the same under FSDP2
	$(BIN)/python launch/demo.py --wrap fsdp2

# Each daemon of the suite waits for the disk at every fsync: where memory has room for the 1.4 GB
# of its files (6 GB are free), they go there. Behind a failure they stay, to be looked at.
IN_MEMORY := /dev/shm/ddpprobe-tests-$(shell echo $(CURDIR) | cksum | cut -d' ' -f1)
HAS_ROOM := $(shell df --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 6000000')

# Its tests wait for daemons and clocks half of the time. A worker takes 1 GB at most.
WORKERS ?= $(shell nproc | awk '{n = 2 * $$1; print (n < 4 ? 4 : n > 16 ? 16 : n)}')

test: .venv/dev.stamp system-packages  # the whole suite: real ranks, a real Prometheus [WORKERS=4]
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  $(if $(HAS_ROOM),--basetemp=$(IN_MEMORY) && rm -rf $(IN_MEMORY))

test-grid: .venv/dev.stamp       # every wrapper, loop, engine ... against one unsharded process
	$(BIN)/python -m tests.grid
	$(BIN)/python -m tests.grid --far

test-faults: .venv/dev.stamp     # kill every writer at every system call, mutate, feed hostile stores
	$(BIN)/python -m tests.faults

test-alerts: .venv/dev.stamp system-packages  # faults in real jobs, until a webhook has heard of them
	$(BIN)/python -m tests.alerts $(CASE)

FRAMEWORKS := lightning huggingface ray deepspeed
test-frameworks: $(FRAMEWORKS:%=.venv-%/run.stamp)  # each trained with the probe
	for name in $(FRAMEWORKS); do \
	  TEST_FRAMEWORKS=1 .venv-$$name/bin/python -m pytest --junitxml=.venv-$$name/proof.xml \
	    tests/frameworks || exit 1; \
	done
	$(BIN)/python -m tests.frameworks.proof

test-models: .venv-models/run.stamp  # models of others: bits, statistics, faults; [MODEL=word] [SEED=1]
	.venv-models/bin/python -m tests.models $(MODEL) $(if $(SEED),--seed $(SEED))

test-versions: .venv/dev.stamp    # Pythons and torches, an environment each; [PYTHONS="3.12 3.13"] [TORCHES=2.6] [KEEP=1]
	$(BIN)/python -m tests.versions $(foreach v,$(PYTHONS),--python $(v)) \
	  $(foreach v,$(TORCHES),--torch $(v)) $(if $(KEEP),--keep)

test-mutants: .venv/mutants.stamp  # change the code a little, again and again: do the tests notice?
	$(BIN)/python -m tests.mutants $(ROOM) $(if $(SAMPLE),--sample $(SAMPLE)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(JOBS),--jobs $(JOBS))

# Not in .venv: the Python that already has a CUDA build of torch, which nothing here replaces.
test-gpu:                        # on a GPU, or DEVICE=cpu as a dry run; [PART=name] [WHEELS=folder]
	$(PYTHON) tests/gpu/__main__.py $(PART) $(if $(DEVICE),--device $(DEVICE)) \
	  $(if $(WHEELS),--wheels $(WHEELS))

test-wheel: .venv/dev.stamp      # the wheel in new environments, with each extra; [EXTRA=name]
	$(BIN)/python -m tests.wheel $(EXTRA)

dist: .venv/dev.stamp            # the wheel and the source archive of a release, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

sbom: dist .venv-cyclonedx/run.stamp  # what is installed with that wheel: sbom/ddpprobe.cdx.json
	rm -rf .venv-sbom sbom && mkdir sbom
	$(BIN)/python -m venv --without-pip .venv-sbom
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip --python .venv-sbom/bin/python install -q \
	  "$$(ls dist/*.whl)[$(SBOM_EXTRAS)]"
	.venv-cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
	  --output-reproducible --validate --of JSON -o sbom/ddpprobe.cdx.json .venv-sbom/bin/python

check: .venv/dev.stamp           # lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dashboards: .venv/dev.stamp      # write what is generated in grafana/ and docs/ anew
	$(BIN)/python -m grafana.build

docs: .venv-docs/run.stamp       # the documentation as a site: .site/index.html
	.venv-docs/bin/zensical build --strict

bench: .venv-peers/run.stamp     # what all of it costs, beside its peers: docs/benchmarks.md
	.venv-peers/bin/python -m benchmarks

bench-detection: .venv-zoo/run.stamp  # planted faults and healthy runs: docs/detection.md; [QUICK=1] [MINUTES=60]
	.venv-zoo/bin/python -m benchmarks.detection $(if $(QUICK),--quick) $(if $(MINUTES),--minutes $(MINUTES))

bench-baseline: .venv-zoo/run.stamp  # the same faults beside good runs: docs/baseline.md; after bench-detection
	.venv-zoo/bin/python -m benchmarks.detection.beside_good

clean:                           # remove what make and the demo have made
	rm -rf .venv .venv-* .site .cache dist sbom ddpprobe-runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutants

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "ddpprobe needs Python 3.11 or newer; choose one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

# The pins hold for what builds the package too, hence also the variable.
.venv/run.stamp: constraints.txt pyproject.toml | $(BIN)/python
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q -e '.[train]'
	@touch $@

# constraints.txt lists the whole development environment, so it serves as the list to install.
.venv/dev.stamp: .venv/run.stamp
	$(BIN)/python -m pip install -q -r constraints.txt
	@touch $@

# The tool brings ten packages that nothing else here needs, so only this command installs them.
.venv/mutants.stamp: .venv/dev.stamp tests/mutants/requirements.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q -r tests/mutants/requirements.txt
	@touch $@

# The peers bring a hundred packages, so they have an environment of their own; one that cannot be
# installed is named in the tables.
.venv-peers/run.stamp: constraints.txt pyproject.toml benchmarks/peers.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-peers
	PIP_CONSTRAINT=constraints.txt .venv-peers/bin/python -m pip install -q -e '.[train]'
	for peer in $$(grep -v '^#' benchmarks/peers.txt); do \
	  PIP_CONSTRAINT=constraints.txt .venv-peers/bin/python -m pip install -q $$peer || true; \
	done
	@touch $@

# The architectures that the benchmark of detection trains bring a gigabyte, so they are not in .venv.
.venv-zoo/run.stamp: constraints.txt pyproject.toml benchmarks/zoo.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-zoo
	PIP_CONSTRAINT=constraints.txt .venv-zoo/bin/python -m pip install -q -e '.[train]' \
	  -r benchmarks/zoo.txt
	@touch $@

.venv-models/run.stamp: constraints.txt pyproject.toml tests/models/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-models
	PIP_CONSTRAINT=constraints.txt .venv-models/bin/python -m pip install -q -e '.[train]' \
	  -r tests/models/requirements.txt
	@touch $@

.venv-docs/run.stamp: docs/requirements.txt constraints.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-docs
	PIP_CONSTRAINT=constraints.txt .venv-docs/bin/python -m pip install -q -r docs/requirements.txt
	@touch $@

.venv-cyclonedx/run.stamp: tests/sbom.txt constraints.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-cyclonedx
	PIP_CONSTRAINT=constraints.txt .venv-cyclonedx/bin/python -m pip install -q -r tests/sbom.txt
	@touch $@

# Each framework has an environment of its own: they bring half a gigabyte, and bounds on each other.
# MLflow takes importlib_metadata below 10 only; nothing else there asks for a newer one.
.venv-%/run.stamp: tests/frameworks/%.txt constraints.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv .venv-$*
	grep -v '^importlib_metadata==' constraints.txt > .venv-$*/constraints.txt
	PIP_CONSTRAINT=.venv-$*/constraints.txt .venv-$*/bin/python -m pip install -q -e '.[train]' \
	  pytest hypothesis -r tests/frameworks/$*.txt
	@touch $@

# The tests let a real Prometheus scrape, promtool check the rules, Alertmanager notify, and Chromium
# draw the report.
system-packages:
	@missing=; \
	command -v prometheus >/dev/null && command -v promtool >/dev/null || missing=prometheus; \
	(command -v prometheus-alertmanager || command -v alertmanager) >/dev/null && \
	  command -v amtool >/dev/null || missing="$$missing prometheus-alertmanager"; \
	command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  missing="$$missing chromium"; \
	test -z "$$missing" && exit 0; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -q --no-install-recommends $$missing; \
	else \
	  echo "make test needs the system packages: $$missing (Debian: apt-get install $$missing)" >&2; \
	  exit 1; \
	fi
