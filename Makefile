# make run: Lockstep on a Kubernetes control plane of its own. make test: all checks and tests that need no root.
CARGO ?= cargo
BIN := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
IMAGE ?= lockstep:$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
HOST = $(shell rustc -vV | sed -n 's/^host: //p')

# Tests that cannot check something here append a line to this file. A make that starts another one shares it.
ifndef LOCKSTEP_TEST_SKIPPED
export LOCKSTEP_TEST_SKIPPED := $(abspath $(BIN))/skipped-tests
$(shell rm -f '$(LOCKSTEP_TEST_SKIPPED)')
endif
define show_skipped
	@sort -u '$(LOCKSTEP_TEST_SKIPPED)' 2>/dev/null | awk '{ lines = lines "  " $$0 "\n" } \
	  END { printf "%d tests skipped%s\n%s", NR, NR ? ":" : "", lines }'
endef

.PHONY: run demo picture test skipped test-all test-versions test-skew lint deny msrv unit e2e model soak controlplane demoplane chart screenshots bench siege fuzz mutants simulate image image-tar dist dist-binary dist-pack test-dist test-interop test-node on-node test-kind help

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

run: demoplane ## run a control plane with Lockstep on it until Ctrl+C
	@$(BIN)/debug/demo run $(BIN)/debug/lockstep

demo: demoplane ## run the walk-through of the README and check its output
	@$(BIN)/debug/demo play $(BIN)/debug/lockstep

picture: controlplane ## draw docs/demo.svg from the walk-through
	@$(BIN)/debug/demo picture $(BIN)/debug/lockstep docs/demo.svg

test-all: ## everything that this machine can test: make test, a release, other versions, mutants, other tools, and the node with all end-to-end tests
	$(MAKE) test
	$(MAKE) deny msrv
	$(MAKE) test-dist
	$(MAKE) test-versions
	$(MAKE) test-skew
	$(MAKE) mutants ALL=1
	$(MAKE) test-interop
	$(MAKE) test-node LOCKSTEP_TEST_FILTER=

test: lint unit e2e model ## check format, lints and docs; run unit, property and end-to-end tests and histories
	$(show_skipped)

skipped:
	$(show_skipped)

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --document-private-items
	@if command -v go >/dev/null; then \
	  echo 'actionlint .github/workflows'; \
	  GOWORK=off go -C tests/actionlint tool actionlint -shellcheck= -pyflakes= $(abspath $(wildcard .github/workflows/*)); \
	else \
	  echo 'make lint: there is no go in PATH, and actionlint is built with it' | tee -a '$(LOCKSTEP_TEST_SKIPPED)'; \
	fi

# Programs that look at the dependencies, compiled once for the user: optimised they would take twice as long.
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lockstep/tools
DENY := $(TOOLS)/cargo-deny@0.20.2/bin/cargo-deny
MACHETE := $(TOOLS)/cargo-machete@0.9.2/bin/cargo-machete

$(DENY) $(MACHETE):
	$(CARGO) install --locked --debug --no-track --root '$(@D)/..' $(notdir $(patsubst %/bin/,%,$(dir $@)))

deny: $(DENY) $(MACHETE) ## check licenses, sources, bans and advisories of all dependencies, and that each is used
	$(DENY) --locked check --hide-inclusion-graph bans licenses sources
	@if $(DENY) --locked fetch db >/dev/null 2>&1; then \
	  $(DENY) --locked check --disable-fetch advisories; \
	else \
	  echo 'make deny: the database of advisories cannot be had here: it is a git repository on github.com' | \
	    tee -a '$(LOCKSTEP_TEST_SKIPPED)'; \
	fi
	$(MACHETE) --with-metadata

# The oldest Rust that can compile Lockstep.
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

msrv: ## compile everything with the oldest supported Rust, unless that is what compiles everything anyway
	@case "$$(rustc --version)" in \
	  'rustc $(MSRV).'*) echo 'make msrv: rustc is $(MSRV), which compiles and tests everything here' ;; \
	  *) if rustup run $(MSRV) rustc --version >/dev/null 2>&1; then \
	       rustup run $(MSRV) cargo check --locked --workspace --all-targets --target-dir '$(BIN)/msrv'; \
	     else \
	       echo 'make msrv: Rust $(MSRV) is not installed: rustup toolchain install $(MSRV)' | tee -a '$(LOCKSTEP_TEST_SKIPPED)'; \
	     fi ;; \
	esac

unit:
	$(CARGO) test --locked --workspace --lib --bins
	$(CARGO) test --locked --workspace --doc

# Tests of memory move hundreds of megabytes, and those of Lockstep as it is shipped measure time. They run by themselves,
# or some would miss their deadlines. Those on a node are for `make test-node`, those with Argo CD, Flux
# and cert-manager for `make test-interop`.
e2e: controlplane
	@$(BIN)/debug/controlplane build helm
	RUST_TEST_THREADS=$${RUST_TEST_THREADS:-8} $(CARGO) test --locked --workspace --test '*' -- \
	  --skip memory:: --skip as_shipped:: --skip argocd:: --skip flux:: --skip cert_manager:: --skip histories_ --skip on_a_real_node --skip machine_is_unchanged_after
	RUST_TEST_THREADS=1 $(CARGO) test --locked --workspace --test e2e -- memory:: as_shipped::

test-versions: controlplane ## run the end-to-end tests on every supported minor of Kubernetes, or on VERSIONS='1.30 1.33'
	@for version in $(or $(VERSIONS),$$($(BIN)/debug/controlplane versions)); do \
	  printf '\nKubernetes %s\n' "$$version"; \
	  LOCKSTEP_TEST_KUBERNETES=$$version $(MAKE) --no-print-directory e2e || exit 1; \
	done
	$(show_skipped)

# One after the other: those with cert-manager send as many requests as they can.
test-interop: controlplane ## test with the code of Argo CD, Flux and cert-manager, which Go builds first (minutes, once)
	@$(BIN)/debug/controlplane build argocd
	@$(BIN)/debug/controlplane build flux
	@$(BIN)/debug/controlplane build cert-manager
	RUST_TEST_THREADS=1 $(CARGO) test --locked --workspace --test e2e -- --nocapture argocd:: flux:: cert_manager::

model: controlplane ## run random histories with faults, judged by the model; LOCKSTEP_MODEL_SEED=… replays one
	$(CARGO) test --locked --workspace --test histories -- --nocapture --skip across_versions

# What users have before they update. After a release, its tag.
LOCKSTEP_PREVIOUS ?= 0d8d4f0

test-skew: controlplane ## run histories with replicas of LOCKSTEP_PREVIOUS and of this version: update, rollback, mixed
	previous=$$(CARGO='$(CARGO)' tests/previous $(LOCKSTEP_PREVIOUS)) && LOCKSTEP_PREVIOUS_BINARY=$$previous \
	  $(CARGO) test --locked --workspace --test histories across_versions -- --nocapture

# The end-to-end tests that run beside the two replicas on the node; all of them if it is empty.
LOCKSTEP_TEST_FILTER ?= webhook:: mirroring:: heal:: tenants:: privilege_escalation::
export LOCKSTEP_TEST_FILTER

test-node: ## test two replicas on a real kubelet, and run end-to-end tests beside them; needs root on Linux
	@$(CARGO) build --locked --workspace
	@reason=$$('$(BIN)/debug/controlplane' preflight); \
	if [ -n "$$reason" ]; then \
	  echo "make test-node: $$reason" | tee -a '$(LOCKSTEP_TEST_SKIPPED)'; \
	else \
	  $(MAKE) --no-print-directory on-node; \
	fi

# The image has the program that the end-to-end tests run, linked once more: static, and small enough to load quickly.
on-node:
	$(CARGO) rustc --locked --package lockstep --example node-image -- -C target-feature=+crt-static -C strip=symbols
	@$(BIN)/debug/controlplane image $(BIN)/debug/examples/node-image $(BIN)/lockstep-node.tar $(IMAGE)
	@$(BIN)/debug/controlplane build
	@$(BIN)/debug/controlplane build node
	LOCKSTEP_TEST_IMAGE="$(abspath $(BIN))/lockstep-node.tar" RUST_TEST_THREADS=$${RUST_TEST_THREADS:-8} \
	  $(CARGO) test --locked --workspace --test node two_replicas_on_a_real_node
	$(show_skipped)

test-kind: ## the same on a kind cluster; needs docker, kind and kubectl
	@tests/kind/run $(IMAGE)

chart: ## regenerate the Helm chart's templates from deploy/
	LOCKSTEP_WRITE_CHART=1 $(CARGO) test --locked --workspace --test e2e chart::templates_are_up_to_date_with_deploy

mutants: controlplane ## break one rule of Lockstep after the other and see the unit tests fail; ALL=1 the end-to-end tests, too; ONLY=name runs one
	@tests/mutants/run $(if $(ALL),--all) $(ONLY)

SECONDS ?= 60

simulate: ## run random histories with faults on the simulated API server for SECONDS
	LOCKSTEP_SIM_SECONDS=$(SECONDS) $(CARGO) test --locked --workspace --profile simulation --lib simulation -- --nocapture

fuzz: ## fuzz what others write, guided by coverage, for MINUTES in all; needs a C++ compiler
	@tests/fuzz $(or $(MINUTES),6) $(ONLY)

screenshots: controlplane ## make the pictures of docs/ui.md; needs chromium, chromedriver and pngquant
	@mkdir -p docs/images
	LOCKSTEP_SCREENSHOTS="$(abspath docs/images)" $(CARGO) test --locked --workspace --test e2e ui::thousand_companions
	pngquant --force --skip-if-larger --ext .png 64 docs/images/ui-*.png

bench: controlplane ## measure Lockstep beside its floors, for less than 20 minutes; QUICK=1 in less than three; ONLY=heal one part
	QUICK=$(QUICK) ONLY=$(ONLY) $(CARGO) bench --locked --workspace --bench bench

siege: controlplane ## measure writes and reviews beside slow, broken and hostile clients, for two minutes
	$(CARGO) bench --locked --workspace --bench siege

soak: controlplane ## one long history with every fault, for MINUTES: times to catch up, writes, memory
	MINUTES=$(or $(MINUTES),20) $(CARGO) bench --locked --workspace --bench soak

image: ## build the image with docker or buildah
	@engine=$$(command -v docker || command -v buildah) || \
	  { echo 'make image needs docker or buildah; make image-tar needs neither' >&2; exit 1; }; \
	"$$engine" build --tag $(IMAGE) --build-arg LOCKSTEP_COMMIT=$(shell git rev-parse --short=12 HEAD) \
	  --build-arg LOCKSTEP_COMMIT_DATE=$(shell git show --no-patch --date=short --format=%cd) .

image-tar: dist-binary ## build the image as an OCI archive without either, for docker load and ctr images import
	$(CARGO) build --locked --workspace
	@$(BIN)/debug/controlplane image $(BIN)/dist/$(TARGET)/lockstep $(BIN)/lockstep-release.tar $(IMAGE)

# What a release is made of. Its bytes depend on these and on the commit, not on the machine's paths or clock.
TARGET ?= $(HOST)
COMMIT ?= $(shell git rev-parse HEAD)
SOURCE_DATE_EPOCH ?= $(shell git show --no-patch --format=%ct)
# Where this repository is published, such as https://github.com/OWNER/lockstep.
REPOSITORY ?=

# The binary is static on Linux, and has no path of this machine in it. The last prefix that matches counts.
RELEASE_FLAGS = $(if $(findstring linux,$(TARGET)),-C target-feature=+crt-static) \
  --remap-path-prefix=$(CURDIR)=/lockstep --remap-path-prefix=$(abspath $(BIN))=/target \
  --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo \
  --remap-path-prefix=$(shell rustc --print sysroot)=/rust

dist: ## everything of a release into dist/, always the same bytes; IMAGE and REPOSITORY say where it is published
	@rm -rf '$(BIN)/dist'
	$(MAKE) --no-print-directory dist-binary
	$(MAKE) --no-print-directory dist-pack

dist-binary: ## build the binary of a release for TARGET, which is this machine unless you name one
	RUSTFLAGS='$(strip $(RELEASE_FLAGS))' $(CARGO) build --locked --release --package lockstep --bin lockstep \
	  --target $(TARGET)
	@mkdir -p '$(BIN)/dist/$(TARGET)'
	@cp '$(BIN)/$(TARGET)/release/lockstep' '$(BIN)/dist/$(TARGET)/'

dist-pack: ## pack the binaries that make dist-binary has built, and everything else of a release
	$(CARGO) build --locked --workspace --bin release
	@rm -rf dist
	@'$(BIN)/debug/release' --binaries '$(BIN)/dist' --out dist --image $(IMAGE) --commit $(COMMIT) \
	  --date $(SOURCE_DATE_EPOCH) $(if $(REPOSITORY),--repository $(REPOSITORY))
	@[ -n '$(REPOSITORY)' ] || echo 'make dist: without REPOSITORY, the krew manifest names example.com'
	@git diff --quiet HEAD 2>/dev/null || echo 'make dist: this checkout differs from its commit'
	@cat dist/SHA256SUMS

# Both builds get the same image name. The node needs root.
test-dist: dist ## test a release: built elsewhere it is the same, krew and Helm take it, a real node runs it
	@tests/dist IMAGE='$(IMAGE)' REPOSITORY='$(REPOSITORY)'
	$(show_skipped)

# Cargo builds everything while Go builds the control plane, if that is not there already.
define prepare
	$(CARGO) build --locked --workspace --bin controlplane
	@$(BIN)/debug/controlplane prepare $(1) $(CARGO) build --locked --workspace
endef

controlplane: ## build the control plane of the tests (about six minutes, once)
	$(call prepare,tests)

demoplane:
	$(call prepare,demo)
