//! Captures what the code under test logs.

use std::{
    io::Write,
    sync::{Arc, Mutex},
};

use tracing::subscriber::DefaultGuard;
use tracing_subscriber::{filter::LevelFilter, fmt, layer::SubscriberExt as _};

use crate::ops::log::filter;

#[derive(Clone, Default)]
pub struct CapturedLogs(Arc<Mutex<Vec<u8>>>);

impl CapturedLogs {
    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    pub fn clear(&self) {
        self.0.lock().unwrap().clear();
    }

    /// Captures the log of this thread at these levels until the guard is dropped.
    pub fn start(&self, levels: &str) -> DefaultGuard {
        let writer = self.clone();
        let subscriber = fmt().with_max_level(LevelFilter::TRACE).with_ansi(false);
        let subscriber = subscriber.with_writer(move || writer.clone()).finish();
        tracing::subscriber::set_default(subscriber.with(filter(levels)))
    }
}

impl Write for CapturedLogs {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
