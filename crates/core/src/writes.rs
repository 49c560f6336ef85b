//! Writes of companions: what is sent, in which order, when again, and which deletes are held.
//!
//! | file | job |
//! | --- | --- |
//! | [`companion_write`] | one write, from its plan to its outcome, as a state machine without I/O |
//! | [`write_request`] | the requests that it sends |
//! | [`fair_queue`] | the order of writes: fair between sources, bounded in all and for each namespace |
//! | [`retry`] | when a failed write is tried again |
//! | [`brake`] | holds deletes that look like an accident |

pub mod brake;
pub mod companion_write;
pub mod fair_queue;
pub mod retry;
pub mod write_request;
