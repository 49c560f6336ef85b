//! The admission webhook: [`crate::tls`] → [`http`] → [`review`] (or [`defaulting`]) → answer.
//!
//! | file | job |
//! | --- | --- |
//! | [`http`] | the routes; runs a review within its limits |
//! | `review_memory`, [`fair_semaphore`] | bound memory and calls, fairly between callers |
//! | `log_rate_limit` | bounds log lines |
//! | [`wire`], [`admission_request`] | AdmissionReview JSON to a request, and the answer back |
//! | [`review`] | decides about a request: [`denial`] lists the reasons, [`messages`] holds the texts |
//! | [`required_access`], [`access`] | the rights that a source needs, and the SubjectAccessReviews that check them |
//! | [`restore`] | a companion that somebody writes back from a backup |
//! | [`preview`] | what the mirror would do for a source, for a dry run |
//! | [`defaulting`] | writes the defaults of a source into one annotation, as a JSON patch |

pub mod access;
pub mod admission_request;
pub mod defaulting;
pub mod denial;
pub mod fair_semaphore;
pub mod http;
mod log_rate_limit;
pub mod messages;
pub mod preview;
pub mod required_access;
pub mod restore;
pub mod review;
mod review_memory;
pub mod wire;
