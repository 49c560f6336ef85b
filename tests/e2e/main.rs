//! End-to-end tests on a real control plane: the behaviour that docs/reference.md and docs/security.md promise. Tests
//! run in parallel, each with a domain and namespaces of its own. See tests/README.md.

mod cert_rotation;
mod certs;
mod chart;
mod cleanup;
mod conflict;
mod crds;
mod fixture;
mod flags;
mod guard;
mod guard_and_policy;
mod guard_down;
mod harness;
mod heal;
mod hostile_reviews;
mod kubectl_commands;
mod leader_election;
mod least_privilege;
mod manifests;
mod mirroring;
mod odd_objects;
mod other_admission;
mod peer;
mod policy;
mod privilege_escalation;
mod protected_namespaces;
mod readme;
mod refused_sources;
mod shutdown;
mod slow_webhook;
mod startup_errors;
mod subject_access;
mod tcp_proxy;
mod tenants;
mod users;
mod watch;
