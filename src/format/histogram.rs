//! Durations in buckets.

use serde::{Deserialize, Serialize};

/// The inclusive upper bounds of the buckets, in seconds.
pub const BOUNDS_SECONDS: [u64; 12] = [10, 30, 60, 300, 900, 1_800, 3_600, 14_400, 43_200, 86_400, 259_200, 604_800];

/// How many durations fell into each bucket, and their sum.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Histogram {
    /// Counts per bucket, not cumulative. The last bucket has no bound.
    pub buckets: [u64; BOUNDS_SECONDS.len() + 1],
    /// The durations' sum in microseconds.
    pub sum_us: u64,
}

impl Histogram {
    /// Adds a duration in microseconds.
    pub fn observe(&mut self, micros: u64) {
        let bucket = &mut self.buckets[BOUNDS_SECONDS.partition_point(|bound| bound * 1_000_000 < micros)];
        *bucket = bucket.saturating_add(1);
        self.sum_us = self.sum_us.saturating_add(micros);
    }

    /// Whether durations in these buckets can have this sum.
    #[must_use]
    pub fn is_plausible(&self) -> bool {
        let bounds = || BOUNDS_SECONDS.iter().map(|seconds| u128::from(*seconds) * 1_000_000);
        let total = |bounds: &mut dyn Iterator<Item = u128>| -> u128 {
            self.buckets.iter().zip(bounds).map(|(count, bound)| u128::from(*count) * bound).sum()
        };
        // What would go beyond the largest number stays there.
        let least = total(&mut std::iter::once(0).chain(bounds())).min(u64::MAX.into());
        let [.., without_bound] = self.buckets;
        let sum = u128::from(self.sum_us);
        least <= sum && (without_bound > 0 || sum <= total(&mut bounds()))
    }

    /// Adds all that the other one observed.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.buckets.iter_mut().zip(other.buckets) {
            *count = count.saturating_add(more);
        }
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_inclusive() {
        let mut histogram = Histogram::default();
        for micros in [0, 10_000_000, 10_000_001, 604_800_000_000, 604_800_000_001] {
            histogram.observe(micros);
        }
        assert_eq!(histogram.buckets, [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(histogram.sum_us, 1_209_620_000_002);
        assert!(histogram.is_plausible());
    }

    #[test]
    fn a_sum_lies_between_the_bounds_of_its_buckets() {
        let with = |sum_us| Histogram { buckets: [2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], sum_us };
        let sums = [29_999_999, 30_000_000, 80_000_000, 80_000_001];
        assert_eq!(sums.map(|sum| with(sum).is_plausible()), [false, true, true, false]);
        let most = Histogram { buckets: [u64::MAX; 13], sum_us: u64::MAX };
        assert!(most.is_plausible());
    }
}
