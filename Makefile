# make run: Lockstep on a Kubernetes control plane of its own. make test: everything that must hold.
CARGO ?= cargo
BIN := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)

.PHONY: run demo test lint unit e2e controlplane bench help

help: ## what can be made
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

run: controlplane ## a control plane with Lockstep on it, until Ctrl+C
	@$(BIN)/debug/demo run $(BIN)/debug/lockstep

demo: controlplane ## play the walk-through of the README, with its real output
	@$(BIN)/debug/demo play $(BIN)/debug/lockstep

test: lint unit e2e ## format, lints, docs, unit, property and end-to-end tests

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --document-private-items

unit:
	$(CARGO) test --locked --workspace --lib --bins

e2e: controlplane
	RUST_TEST_THREADS=$${RUST_TEST_THREADS:-8} $(CARGO) test --locked --workspace --test '*'

bench: controlplane ## measurements, each beside its floor
	$(CARGO) bench --locked --bench mirror

controlplane: ## build the control plane (about six minutes, once)
	$(CARGO) build --locked --workspace
	@$(BIN)/debug/controlplane build
