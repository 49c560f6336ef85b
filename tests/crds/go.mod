// Pins the CRDs of the Prometheus operator that deploy/components are tested with; tests/cert-manager pins those of
// cert-manager. Nothing is compiled: the CRDs are files in this module.
module lockstep.test/crds

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.94.1
