// Pins the CRDs that deploy/components are tested with. Nothing is compiled: the CRDs are files in these modules.
module lockstep.test/crds

go 1.26.0

require (
	github.com/cert-manager/cert-manager v1.21.2
	github.com/prometheus-operator/prometheus-operator v0.94.1
)
