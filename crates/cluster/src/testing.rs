//! For tests.

pub mod api;
