//! `lockstep migrate`.

pub mod regex;
