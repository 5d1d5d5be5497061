//! The metric families of all `.prom` files.

use prometheus::proto::{self, Bucket, Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

use super::{Health, JobRun, LAST_SUCCESS, REMOVED, Removed, last_success_of};
use crate::format::envelope::Status;
use crate::format::histogram::{BOUNDS_SECONDS, Histogram};
use crate::format::ledger::Totals;
use crate::format::malformed::Reason;
use crate::format::spend::Tokens;
use crate::format::time::seconds;
use crate::store::blob::BlobUsage;
use crate::store::queue::{BlobReading, Reading};

/// The statuses whose oldest record is told: those in which a record waits for somebody.
const WAITING: [Status; 3] = [Status::Queued, Status::Running, Status::Human];

/// What the queue and the blob store hold. A family without samples leaves no trace in the text.
pub(super) const OF_READING: [fn(&Reading) -> MetricFamily; 17] = [
    |reading| {
        let samples = of_blobs(reading, |blobs| blobs.usage.bytes);
        gauge("handoff_blob_bytes", "Size of all blobs in the store.", samples)
    },
    |reading| {
        let samples = of_blobs(reading, |blobs| blobs.missing_references);
        gauge("handoff_blob_missing_references", "References in the queue to blobs that are not in the store.", samples)
    },
    |reading| gauge("handoff_blob_objects", "Blobs in the store.", of_blobs(reading, |blobs| blobs.usage.objects)),
    |reading| {
        let mut samples = Vec::new();
        for (role, kind, cell) in reading.summary.cells() {
            for (status, count) in [(Status::Dead, cell.totals.dead), (Status::Done, cell.totals.done)] {
                samples.push(sample([("role", role), ("kind", kind), ("outcome", status.as_str())], float(count)));
            }
        }
        counter("handoff_finished_total", "Records that are done or dead, removed ones included.", samples)
    },
    |reading| {
        let samples = by_role_and_kind(reading, |totals| float(totals.nacks));
        counter("handoff_nacks_total", "How often records were refused by their role.", samples)
    },
    |reading| gauge("handoff_queue_bytes", "Size of the queue file.", vec![sample([], float(reading.queue_bytes))]),
    |reading| {
        let samples = vec![sample([], float(reading.generations))];
        gauge(
            "handoff_queue_generations",
            "Earlier generations of the queue on disk that are not drained yet.",
            samples,
        )
    },
    |reading| {
        let count = |reason: Reason| float(reading.summary.malformed[reason as usize]);
        gauge(
            "handoff_queue_malformed_lines",
            "Lines of the queue that are no records, by reason. They are kept as they are.",
            Reason::ALL.into_iter().map(|reason| sample([("reason", reason.as_str())], count(reason))).collect(),
        )
    },
    |reading| {
        let mut samples = Vec::new();
        for (role, cell) in &reading.summary.roles() {
            for status in WAITING {
                if let Some(ts) = cell.oldest[status as usize] {
                    samples.push(sample([("role", role), ("status", status.as_str())], ts.as_seconds()));
                }
            }
        }
        let help = "When the oldest record in this status was queued.";
        gauge("handoff_queue_oldest_timestamp_seconds", help, samples)
    },
    |reading| {
        gauge(
            "handoff_queue_oversized_records",
            "Records with values over the limit, which the next offload would move to the blob store.",
            vec![sample([], float(reading.summary.oversized))],
        )
    },
    |reading| {
        let mut samples = Vec::new();
        for (role, kind, cell) in reading.summary.cells() {
            for status in Status::ALL {
                let count = cell.live[status as usize];
                if status != Status::Other || count > 0 {
                    samples.push(sample([("role", role), ("kind", kind), ("status", status.as_str())], float(count)));
                }
            }
        }
        gauge("handoff_queue_records", "Records in the queue, by the role they are for, kind and status.", samples)
    },
    |reading| {
        let metrics = by_role(reading, |totals| &totals.queue_wait);
        histogram("handoff_queue_wait_seconds", "How long records waited from queued to started.", metrics)
    },
    |reading| {
        let samples = by_role_and_kind(reading, |totals| float(totals.records));
        counter("handoff_records_total", "Records ever queued, removed ones included.", samples)
    },
    |reading| {
        let metrics = by_role(reading, |totals| &totals.role_time);
        histogram("handoff_role_time_seconds", "How long roles took for records, from started to finished.", metrics)
    },
    |reading| {
        counter(
            "handoff_spend_unpriced_records_total",
            "Records with a model response whose cost is not known. It is missing from handoff_spend_usd_total.",
            by_role_and_kind(reading, |totals| float(totals.unpriced)),
        )
    },
    |reading| {
        let samples = by_role_and_kind(reading, |totals| totals.spend_usd.to_f64());
        counter("handoff_spend_usd_total", "What the model responses cost that have a price.", samples)
    },
    |reading| {
        let mut samples = Vec::new();
        for (kind, model, tokens) in reading.summary.tokens() {
            for (token_type, count) in Tokens::TYPES.into_iter().zip(tokens.counts()) {
                samples.push(sample([("kind", kind), ("model", model), ("token_type", token_type)], float(count)));
            }
        }
        counter("handoff_tokens_total", "Tokens of model responses. The four types do not overlap.", samples)
    },
];

/// The exporter's own health.
pub(super) const OF_HEALTH: [fn(Health) -> MetricFamily; 4] = [
    |_| {
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        gauge(
            "handoff_build_info",
            "Always 1; the version of the exporter is in the label.",
            vec![sample(version, 1.0)],
        )
    },
    |health| {
        let samples = vec![sample([], health.duration)];
        gauge("handoff_exporter_duration_seconds", "How long the last run of the exporter took.", samples)
    },
    |health| {
        let samples = health.last_success.map(|time| sample([], time)).into_iter().collect();
        gauge(LAST_SUCCESS, "When the exporter last could read everything, 0 if never. Alert on its age.", samples)
    },
    |health| {
        gauge(
            "handoff_exporter_success",
            "Whether the last run of the exporter could read everything (1) or not (0).",
            vec![sample([], f64::from(u8::from(health.success)))],
        )
    },
];

/// How a maintenance job went: four families, all of whose names begin with `handoff_<job>_`.
pub(super) fn of_job(job: &str, run: JobRun) -> [MetricFamily; 4] {
    let gauge_of = |name: &str, help: &str, value: Option<f64>| {
        gauge(name, help, value.map(|value| sample([], value)).into_iter().collect())
    };
    let family = |what: &str, help: &str, value| gauge_of(&format!("handoff_{job}_{what}"), help, Some(value));
    [
        family("duration_seconds", "How long the last run took.", run.duration),
        family("last_run_timestamp_seconds", "When the last run began.", run.began),
        gauge_of(&last_success_of(job), "When a run last did all it should, 0 if never.", run.last_success),
        family("success", "Whether the last run did all it should (1) or not (0).", f64::from(u8::from(run.success))),
    ]
}

/// What a run of offload did.
pub(super) fn of_offload(written: Option<BlobUsage>, pruned: Option<BlobUsage>) -> [MetricFamily; 3] {
    let family = |name: &str, help: &str, usage: Option<BlobUsage>, value: fn(BlobUsage) -> u64| {
        gauge(name, help, usage.map(|usage| sample([], float(value(usage)))).into_iter().collect())
    };
    [
        family("handoff_offload_last_run_bytes", "Size of the blobs that the last run wrote.", written, |usage| {
            usage.bytes
        }),
        family("handoff_offload_last_run_objects", "Blobs that the last run wrote.", written, |usage| usage.objects),
        family(
            "handoff_offload_last_run_pruned_objects",
            "Blobs that nothing referred to, and that the last run removed.",
            pruned,
            |usage| usage.objects,
        ),
    ]
}

/// What compaction has removed so far.
pub(super) fn of_removed(removed: Removed) -> [MetricFamily; 2] {
    let [records, bytes] = REMOVED;
    [
        counter(
            bytes,
            "Bytes of the records that compaction has removed from the queue.",
            vec![sample([], removed.bytes)],
        ),
        counter(records, "Records that compaction has removed from the queue.", vec![sample([], removed.records)]),
    ]
}

fn of_blobs(reading: &Reading, value: fn(&BlobReading) -> u64) -> Vec<Sample> {
    reading.blobs.as_ref().ok().map(|blobs| sample([], float(value(blobs)))).into_iter().collect()
}

fn by_role_and_kind(reading: &Reading, value: fn(&Totals) -> f64) -> Vec<Sample> {
    let cells = reading.summary.cells();
    cells.map(|(role, kind, cell)| sample([("role", role), ("kind", kind)], value(&cell.totals))).collect()
}

fn by_role(reading: &Reading, value: fn(&Totals) -> &Histogram) -> Vec<Metric> {
    let roles = reading.summary.roles();
    roles.iter().map(|(role, cell)| distribution([("role", role)], value(&cell.totals))).collect()
}

/// One value with its labels.
struct Sample {
    labels: Vec<LabelPair>,
    value: f64,
}

fn sample<const N: usize>(labels: [(&str, &str); N], value: f64) -> Sample {
    Sample { labels: pairs(labels), value }
}

fn pairs<const N: usize>(labels: [(&str, &str); N]) -> Vec<LabelPair> {
    let pair = |(name, value): (&str, &str)| {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value.to_owned());
        pair
    };
    labels.into_iter().map(pair).collect()
}

fn gauge(name: &str, help: &str, samples: Vec<Sample>) -> MetricFamily {
    let metric = |Sample { labels, value }| {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        let mut metric = Metric::from_label(labels);
        metric.set_gauge(gauge);
        metric
    };
    family(name, help, MetricType::GAUGE, samples.into_iter().map(metric).collect())
}

fn counter(name: &str, help: &str, samples: Vec<Sample>) -> MetricFamily {
    let metric = |Sample { labels, value }| {
        let mut counter = Counter::default();
        counter.set_value(value);
        let mut metric = Metric::from_label(labels);
        metric.set_counter(counter);
        metric
    };
    family(name, help, MetricType::COUNTER, samples.into_iter().map(metric).collect())
}

fn histogram(name: &str, help: &str, metrics: Vec<Metric>) -> MetricFamily {
    family(name, help, MetricType::HISTOGRAM, metrics)
}

fn distribution<const N: usize>(labels: [(&str, &str); N], observed: &Histogram) -> Metric {
    let mut cumulative = 0_u64;
    let buckets = BOUNDS_SECONDS.iter().zip(observed.buckets).map(|(&bound, count)| {
        cumulative = count.saturating_add(cumulative);
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(float(bound));
        bucket.set_cumulative_count(cumulative);
        bucket
    });
    let mut histogram = proto::Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(observed.buckets.iter().fold(0, |sum, count| count.saturating_add(sum)));
    histogram.set_sample_sum(seconds(observed.sum_us));
    let mut metric = Metric::from_label(pairs(labels));
    metric.set_histogram(histogram);
    metric
}

fn family(name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}

#[expect(clippy::cast_precision_loss, reason = "samples are floats, and exact up to 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}
