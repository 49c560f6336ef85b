# make run: Lockstep on a Kubernetes control plane of its own. make test: all checks and tests that need no root.
CARGO ?= cargo
BIN := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
IMAGE ?= lockstep:$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
PROFILE ?= release

.PHONY: run demo picture test test-all lint unit e2e controlplane demoplane chart screenshots bench siege mutants image image-tar test-node on-node test-kind help

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

run: demoplane ## run a control plane with Lockstep on it until Ctrl+C
	@$(BIN)/debug/demo run $(BIN)/debug/lockstep

demo: demoplane ## run the walk-through of the README and check its output
	@$(BIN)/debug/demo play $(BIN)/debug/lockstep

picture: controlplane ## draw docs/demo.svg from the walk-through
	@$(BIN)/debug/demo picture $(BIN)/debug/lockstep docs/demo.svg

test-all: ## everything that this machine can test: make test, make mutants, and the node with all end-to-end tests
	$(MAKE) test
	$(MAKE) mutants
	$(MAKE) test-node LOCKSTEP_TEST_FILTER=

test: lint unit e2e ## check format, lints and docs; run unit, property and end-to-end tests

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --document-private-items

unit:
	$(CARGO) test --locked --workspace --lib --bins
	$(CARGO) test --locked --doc

# Tests of memory move hundreds of megabytes. They run by themselves, or others would miss their deadlines.
e2e: controlplane
	@$(BIN)/debug/controlplane build helm
	RUST_TEST_THREADS=$${RUST_TEST_THREADS:-8} $(CARGO) test --locked --workspace --test '*' -- --skip memory::
	$(CARGO) test --locked --test e2e memory::

# The end-to-end tests that run beside the two replicas on the node; all of them if it is empty.
LOCKSTEP_TEST_FILTER ?= guard:: mirroring:: heal:: tenants:: privilege_escalation::
export LOCKSTEP_TEST_FILTER

test-node: ## test two replicas on a real kubelet, and run end-to-end tests beside them; needs root on Linux
	@$(CARGO) build --locked --workspace
	@reason=$$('$(BIN)/debug/controlplane' preflight); \
	if [ -n "$$reason" ]; then \
	  echo "test-node is skipped, nothing was tested on a real node: $$reason"; \
	else \
	  $(MAKE) --no-print-directory on-node; \
	fi

on-node:
	@$(MAKE) --no-print-directory image-tar PROFILE=node
	@$(BIN)/debug/controlplane build
	@$(BIN)/debug/controlplane build node
	LOCKSTEP_TEST_IMAGE="$(abspath $(BIN))/lockstep-node.tar" RUST_TEST_THREADS=$${RUST_TEST_THREADS:-8} \
	  $(CARGO) test --locked --workspace --test node

test-kind: ## the same on a kind cluster; needs docker, kind and kubectl
	@tests/kind/run $(IMAGE)

chart: ## regenerate the Helm chart's templates from deploy/
	LOCKSTEP_WRITE_CHART=1 $(CARGO) test --locked --workspace --test e2e chart::templates_are_up_to_date_with_deploy

mutants: controlplane ## break one rule of Lockstep after the other and see the tests fail; ONLY=name runs one
	@tests/mutants/run $(ONLY)

screenshots: controlplane ## make the pictures of docs/ui.md; needs chromium, chromedriver and pngquant
	@mkdir -p docs/images
	LOCKSTEP_SCREENSHOTS="$(abspath docs/images)" $(CARGO) test --locked --test e2e ui::thousand_companions
	pngquant --force --skip-if-larger --ext .png 64 docs/images/ui-*.png

bench: controlplane ## run the benchmarks, each with a baseline
	$(CARGO) bench --locked --bench mirror

siege: controlplane ## measure a tenant's writes beside hostile tenants and peers, for two minutes
	$(CARGO) bench --locked --bench siege

image: ## build the image with docker or buildah
	@engine=$$(command -v docker || command -v buildah) || \
	  { echo 'make image needs docker or buildah; make image-tar needs neither' >&2; exit 1; }; \
	"$$engine" build --tag $(IMAGE) .

image-tar: ## build the image as an OCI archive without either, for docker load and ctr images import
	RUSTFLAGS="-C target-feature=+crt-static" \
	  $(CARGO) build --locked --profile $(PROFILE) --bin lockstep --target $(HOST)
	$(CARGO) build --locked --workspace
	@$(BIN)/debug/controlplane image $(BIN)/$(HOST)/$(PROFILE)/lockstep $(BIN)/lockstep-$(PROFILE).tar $(IMAGE)

# Cargo builds everything while Go builds the control plane, if that is not there already.
define prepare
	$(CARGO) build --locked --workspace --bin controlplane
	@$(BIN)/debug/controlplane prepare $(1) $(CARGO) build --locked --workspace
endef

controlplane: ## build the control plane of the tests (about six minutes, once)
	$(call prepare,tests)

demoplane:
	$(call prepare,demo)
