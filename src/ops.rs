//! What operators see: metrics, health, logs.

mod exposition;
pub mod health;
pub mod log;
pub mod metrics;
#[cfg(test)]
mod monitoring;
mod process;
pub mod watches;
