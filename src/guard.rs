//! The webhook: tls → http → review.

pub mod access;
pub mod denial;
pub mod http;
pub mod intake;
pub mod pace;
pub mod review;
pub mod stamp;
pub mod text;
pub mod wire;
