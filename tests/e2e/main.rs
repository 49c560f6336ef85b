//! Every row of the mirror's table, on a real control plane. Tests run in parallel, each with its own domain.

mod conflict;
mod follow;
mod harness;
mod heal;
mod input;
mod leave;
mod life;
mod limits;
mod refuse;
