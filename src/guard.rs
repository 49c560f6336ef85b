//! The admission webhook: [`crate::tls`] → [`http`] → [`review`] (or [`defaulting`]) → answer.

pub mod access;
pub mod body_budget;
pub mod defaulting;
pub mod denial;
pub mod http;
pub mod log_rate_limit;
pub mod messages;
pub mod request;
pub mod required_access;
pub mod review;
pub mod wire;
