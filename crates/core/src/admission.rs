//! The rules of the webhook: a review in, an answer out.
//!
//! | file | job |
//! | --- | --- |
//! | [`admission_request`] | what is reviewed |
//! | [`review`] | decides: [`denial`] lists the reasons, [`messages`] holds the texts |
//! | [`required_access`] | the rights that a source needs of its author |
//! | [`restore`] | a companion that somebody writes back from a backup |
//! | [`defaulting`] | writes the defaults of a source into one annotation, as a JSON patch |

pub mod admission_request;
pub mod defaulting;
pub mod denial;
pub mod messages;
pub mod required_access;
pub mod restore;
pub mod review;
