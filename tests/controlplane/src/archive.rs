//! Archives whose bytes depend on their content alone: tar, and gzip.

use std::io::Write;

use flate2::{Compression, GzBuilder};

const BLOCK: usize = 512;

/// Builds a tar file of regular files, owned by root, all of one time.
#[derive(Debug)]
pub struct Tar {
    modified: u64,
    bytes: Vec<u8>,
}

impl Tar {
    /// An empty archive of files that were modified at this Unix time.
    #[must_use]
    pub fn new(modified: u64) -> Self {
        Self { modified, bytes: Vec::new() }
    }

    /// Adds a file.
    ///
    /// # Panics
    /// When the name does not fit into a header: it has 100 bytes.
    pub fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        let mut header = [0; BLOCK];
        let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        assert!(name.len() <= 100, "{name} is too long for a tar header");
        put(0, name);
        put(100, &format!("{mode:07o}"));
        put(108, "0000000");
        put(116, "0000000");
        put(124, &format!("{:011o}", content.len()));
        put(136, &format!("{:011o}", self.modified));
        // The checksum field counts as blanks.
        put(148, "        ");
        put(156, "0");
        put(257, "ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend(header);
        self.bytes.extend(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK), 0);
    }

    /// The archive.
    #[must_use]
    pub fn end(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 2 * BLOCK, 0);
        self.bytes
    }
}

/// Compresses these bytes, without a time and without the name of an operating system.
///
/// # Errors
/// Never: memory can be written to.
pub fn gzip(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    const UNKNOWN_SYSTEM: u8 = 255;
    let builder = GzBuilder::new().mtime(0).operating_system(UNKNOWN_SYSTEM);
    let mut writer = builder.write(Vec::new(), Compression::best());
    writer.write_all(bytes)?;
    writer.finish()
}
