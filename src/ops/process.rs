//! The metrics about a process that dashboards of every program share, read from `/proc` when they are scraped. Where
//! there is no `/proc`, there are none.

use std::fs;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};

/// Clock ticks a second in `/proc`: Linux shows all of its times in this unit, whatever the kernel's own is.
const TICKS: f64 = 100.0;

/// Reads them on every scrape.
#[derive(Debug)]
pub struct ProcessMetrics;

/// What `/proc` says about this process.
#[derive(Debug, PartialEq)]
struct Process {
    cpu_seconds: f64,
    /// As a Unix time.
    start: f64,
    virtual_bytes: u64,
    resident_bytes: u64,
    open_fds: u64,
    max_fds: Option<u64>,
}

impl Process {
    fn read() -> Option<Self> {
        let text = |path| fs::read_to_string(path).ok();
        let open_fds = fs::read_dir("/proc/self/fd").ok()?.count();
        Self::parse(
            &text("/proc/self/stat")?,
            &text("/proc/self/status")?,
            &text("/proc/stat")?,
            &text("/proc/self/limits")?,
            open_fds.try_into().ok()?,
        )
    }

    /// PURE. Reads `/proc/self/stat`, `/proc/self/status`, `/proc/stat` and `/proc/self/limits`.
    fn parse(stat: &str, status: &str, system: &str, limits: &str, open_fds: u64) -> Option<Self> {
        // The second field is the name of the program, in parentheses, and may contain anything. The third follows it.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let seconds = |ticks: u64| f64::from(u32::try_from(ticks).unwrap_or(u32::MAX)) / TICKS;
        let bytes = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        };
        let boot: u32 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
        let max_fds = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
        Some(Self {
            cpu_seconds: seconds(field(14)? + field(15)?),
            start: f64::from(boot) + seconds(field(22)?),
            virtual_bytes: bytes("VmSize:")?,
            resident_bytes: bytes("VmRSS:")?,
            open_fds,
            max_fds: max_fds.and_then(|line| line.split_whitespace().next()?.parse().ok()),
        })
    }
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Some(process) = Process::read() else { return Ok(()) };
        let cpu = ConstCounter::new(process.cpu_seconds);
        encode(&mut encoder, "process_cpu_seconds", "User and system CPU time spent", &cpu)?;
        let start = ConstGauge::new(process.start);
        let help = "When the process was started, as a Unix time";
        encode(&mut encoder, "process_start_time_seconds", help, &start)?;
        for (name, help, value) in [
            ("process_virtual_memory_bytes", "Virtual memory", Some(process.virtual_bytes)),
            ("process_resident_memory_bytes", "Resident memory", Some(process.resident_bytes)),
            ("process_open_fds", "Open file descriptors", Some(process.open_fds)),
            ("process_max_fds", "Maximum number of open file descriptors", process.max_fds),
        ] {
            if let Some(value) = value.and_then(|value| i64::try_from(value).ok()) {
                encode(&mut encoder, name, help, &ConstGauge::new(value))?;
            }
        }
        Ok(())
    }
}

fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> std::fmt::Result {
    metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_process_are_read_whatever_its_name_is() {
        let stat =
            "4242 (a) b (c) S 1 1 1 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 9 0 12345 9000000 2500 1844 1 1";
        let status = "Name:\ta) b (c\nVmSize:\t  9000 kB\nVmRSS:\t    250 kB\n";
        let system = "cpu 1 2 3\nbtime 1700000000\nprocesses 4\n";
        let limits =
            "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024   524288   files\n";
        let expected = Process {
            cpu_seconds: 3.0,
            start: 1_700_000_123.45,
            virtual_bytes: 9000 << 10,
            resident_bytes: 250 << 10,
            open_fds: 7,
            max_fds: Some(1024),
        };
        assert_eq!(Process::parse(stat, status, system, limits, 7), Some(expected));
        let unlimited = limits.replace("1024", "unlimited");
        assert_eq!(Process::parse(stat, status, system, &unlimited, 7).unwrap().max_fds, None);
        assert_eq!(Process::parse("", status, system, limits, 7), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_figures() {
        let process = Process::read().unwrap();
        assert!(process.start > 1_600_000_000.0 && process.resident_bytes > 1 << 20 && process.open_fds > 2);
    }
}
