//! Every row of the mirror's table, and both locks, on a real control plane. Tests run in parallel, each with its own domain.

mod asked;
mod certs;
mod chart;
mod conflict;
mod crds;
mod down;
mod follow;
mod guard;
mod harness;
mod heal;
mod input;
mod leave;
mod life;
mod limits;
mod manifests;
mod person;
mod policy;
mod privileges;
mod refuse;
mod relay;
mod replicas;
mod rights;
mod rotate;
mod stage;
mod verbs;
