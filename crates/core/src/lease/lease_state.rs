//! What a Lease says about its instance.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;

use super::record::LeaseRecord;
use crate::{keys::Keys, lease::settings::PublishedSettings, object::time::later};

#[derive(Debug, Clone)]
pub struct LeaseState {
    /// None if the Lease was released, or has expired.
    pub leader: Option<String>,
    pub renewed: Option<Timestamp>,
    /// None if they cannot be read.
    pub settings: Option<PublishedSettings>,
    pub annotations: BTreeMap<String, String>,
}

impl LeaseState {
    pub fn of(lease: LeaseRecord, keys: &Keys, now: Timestamp) -> Self {
        let annotations = lease.metadata.annotations.unwrap_or_default();
        let renewed = lease.renew_time.map(|time| time.0);
        // The clocks of this machine and of the leader may differ by a few seconds.
        let is_held = renewed.is_some_and(|renewed| now < later(renewed, lease.duration * 2));
        let settings = annotations.get(&keys.settings).and_then(|text| serde_json::from_str(text).ok());
        let leader = Some(lease.holder).filter(|holder| is_held && !holder.is_empty());
        Self { leader, renewed, settings, annotations }
    }
}
