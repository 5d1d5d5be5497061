//! A reading of the queue as metric families, and these as text.

mod families;

use std::sync::Mutex;

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Metric, MetricFamily};
use prometheus::{Registry, TextEncoder};

use crate::store::blob::BlobUsage;
use crate::store::queue::Reading;

/// How a run of the exporter went.
#[derive(Clone, Copy, Debug)]
pub struct Health {
    /// Whether everything could be read.
    pub success: bool,
    /// When that was last so, in seconds since the epoch; 0 for never, `None` if unknown.
    pub last_success: Option<f64>,
    /// How long this run took, in seconds.
    pub duration: f64,
}

/// The metric by which a run tells the next when it succeeded.
pub const LAST_SUCCESS: &str = "handoff_exporter_last_success_timestamp_seconds";

/// How a run of a maintenance job went.
#[derive(Clone, Copy, Debug)]
pub struct JobRun {
    /// Whether it did all it should.
    pub success: bool,
    /// When it began, in seconds since the epoch.
    pub began: f64,
    /// When a run last succeeded, in seconds since the epoch; 0 for never, `None` if unknown.
    pub last_success: Option<f64>,
    /// How long it took, in seconds.
    pub duration: f64,
}

/// What compaction has removed so far.
#[derive(Clone, Copy, Debug)]
pub struct Removed {
    /// How many records.
    pub records: f64,
    /// How many bytes.
    pub bytes: f64,
}

/// Everything in `handoff.prom`. Without a reading only the health of the exporter: what couldn't be read has no value.
///
/// # Errors
/// If a family contradicts itself, which would be a bug.
pub fn render(reading: Option<&Reading>, health: Health) -> prometheus::Result<String> {
    let of_reading = reading.into_iter().flat_map(|reading| families::OF_READING.map(|family| family(reading)));
    let of_health = families::OF_HEALTH.map(|family| family(health));
    encode(of_reading.chain(of_health))
}

/// Everything in `handoff_compact.prom`.
///
/// # Errors
/// If a family contradicts itself, which would be a bug.
pub fn render_compact(run: JobRun, removed: Option<Removed>) -> prometheus::Result<String> {
    let removed = removed.into_iter().flat_map(families::of_removed);
    encode(families::of_job("compact", run).into_iter().chain(removed))
}

/// Everything in `handoff_offload.prom`: what was written and what was pruned, each unless it failed.
///
/// # Errors
/// If a family contradicts itself, which would be a bug.
pub fn render_offload(
    run: JobRun,
    written: Option<BlobUsage>,
    pruned: Option<BlobUsage>,
) -> prometheus::Result<String> {
    encode(families::of_job("offload", run).into_iter().chain(families::of_offload(written, pruned)))
}

/// The metric by which a run of a maintenance job tells the next when it succeeded.
#[must_use]
pub fn last_success_of(job: &str) -> String {
    format!("handoff_{job}_last_success_timestamp_seconds")
}

/// The counters by which runs of compaction tell the next what was removed: records and bytes.
pub const REMOVED: [&str; 2] = ["handoff_compact_removed_records_total", "handoff_compact_reclaimed_bytes_total"];

fn encode(families: impl Iterator<Item = MetricFamily>) -> prometheus::Result<String> {
    let mut text = String::new();
    // One family at a time: a queue with very many roles and kinds makes large ones.
    for family in families {
        let registry = Registry::new();
        registry.register(Box::new(Snapshot::new(family)?))?;
        TextEncoder::new().encode_utf8(&registry.gather(), &mut text)?;
    }
    Ok(text)
}

/// The value of the metric `name`, which has no labels, in text of an earlier output.
#[must_use]
pub fn previous_value(text: &str, name: &str) -> Option<f64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0)
}

/// A collector of values that are already known, to be asked once.
struct Snapshot {
    description: Desc,
    family: Mutex<Option<MetricFamily>>,
}

impl Snapshot {
    fn new(family: MetricFamily) -> prometheus::Result<Self> {
        let labels = family.get_metric().first().map_or(&[][..], Metric::get_label);
        let names = labels.iter().map(|label| label.name().to_owned()).collect();
        let description = Desc::new(family.name().to_owned(), family.help().to_owned(), names, [].into())?;
        Ok(Self { description, family: Mutex::new(Some(family)) })
    }
}

impl Collector for Snapshot {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.description]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.family.lock().ok().and_then(|mut family| family.take()).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_again() {
        let health = Health { success: false, last_success: Some(1_764_400_000.5), duration: 0.25 };
        let text = render(None, health).unwrap_or_default();
        assert_eq!(previous_value(&text, LAST_SUCCESS), Some(1_764_400_000.5));
        assert_eq!(previous_value(&text, "handoff_exporter"), None);
        assert_eq!(previous_value("x NaN\n", "x"), None);
        assert_eq!(previous_value("x -1\n", "x"), None);
        assert_eq!(previous_value("# x 1\nxx 2\n", "x"), None);
    }
}
