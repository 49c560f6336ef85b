//! For tests: servers and their clients, and a simulation of the controller.

pub mod captured_logs;
mod module_graph;
pub mod peer;
mod simulation;
pub mod store;
