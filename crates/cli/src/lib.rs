//! The commands for people. They ask the API server with the rights of the person who runs them, and decide with the
//! same code as the controller.
//!
//! | module | job |
//! | --- | --- |
//! | [`commands`] | the command line, one file per command |
//! | [`inspect`] | what commands see of a cluster |
//! | [`ui`] | the page of `lockstep ui` |
//! | [`migrate`] | takes copies over from another tool |
//! | [`program`] | what commands need of the rest of the program |
#![forbid(unsafe_code)]

pub mod commands;
pub mod inspect;
pub mod migrate;
pub mod program;
mod ui;
