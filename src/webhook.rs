//! The admission webhook: [`crate::tls`] → [`http`] → [`lockstep_core::admission`] → answer.
//!
//! | file | job |
//! | --- | --- |
//! | [`http`] | the routes; runs a review within its limits |
//! | `review_memory`, [`fair_semaphore`] | bound memory and calls, fairly between callers |
//! | `log_rate_limit` | bounds log lines |
//! | [`wire`] | AdmissionReview JSON to a request, and the answer back |
//! | [`access`] | SubjectAccessReviews: may this user do that? |
//! | [`preview`] | what the controller would do for a source, for a dry run |

pub mod access;
mod fair_semaphore;
pub mod http;
mod log_rate_limit;
mod preview;
mod review_memory;
pub mod wire;
