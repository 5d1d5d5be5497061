//! A reading of the queue as metric families, and these as text.

mod families;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Registry, TextEncoder};

use crate::store::queue::Reading;

/// How a run of the exporter went.
#[derive(Clone, Copy, Debug)]
pub struct Health {
    /// Whether everything could be read.
    pub success: bool,
    /// When that was last so, in seconds since the epoch; 0 for never.
    pub last_success: f64,
    /// How long this run took, in seconds.
    pub duration: f64,
}

/// The metric by which a run tells the next when it succeeded.
pub const LAST_SUCCESS: &str = "handoff_exporter_last_success_timestamp_seconds";

/// Everything in `handoff.prom`. Without a reading only the health of the exporter: what couldn't be read has no value.
///
/// # Errors
/// If the families contradict each other, which would be a bug.
pub fn render(reading: Option<&Reading>, health: Health) -> prometheus::Result<String> {
    let mut families = families::of_health(health);
    if let Some(reading) = reading {
        families.extend(families::of_reading(reading));
    }
    let registry = Registry::new();
    registry.register(Box::new(Snapshot::new(families)?))?;
    TextEncoder::new().encode_to_string(&registry.gather())
}

/// The value of the metric `name`, which has no labels, in an earlier output.
#[must_use]
pub fn sample(text: &str, name: &str) -> Option<f64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0)
}

/// A collector of values that are already known.
struct Snapshot {
    descriptions: Vec<Desc>,
    families: Vec<MetricFamily>,
}

impl Snapshot {
    fn new(families: Vec<MetricFamily>) -> prometheus::Result<Self> {
        let describe = |family: &MetricFamily| {
            let metric = family.get_metric().first();
            let labels = metric.map(|metric| metric.get_label().iter().map(|label| label.name().to_owned()).collect());
            Desc::new(family.name().to_owned(), family.help().to_owned(), labels.unwrap_or_default(), [].into())
        };
        let descriptions = families.iter().map(describe).collect::<prometheus::Result<_>>()?;
        Ok(Self { descriptions, families })
    }
}

impl Collector for Snapshot {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.families.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_found_again() {
        let health = Health { success: false, last_success: 1_764_400_000.5, duration: 0.25 };
        let text = render(None, health).unwrap_or_default();
        assert_eq!(sample(&text, LAST_SUCCESS), Some(1_764_400_000.5));
        assert_eq!(sample(&text, "handoff_exporter"), None);
        assert_eq!(sample("x NaN\n", "x"), None);
        assert_eq!(sample("x -1\n", "x"), None);
        assert_eq!(sample("# x 1\nxx 2\n", "x"), None);
    }
}
