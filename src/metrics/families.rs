//! The metric families of `handoff.prom`.

use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

use super::{Health, LAST_SUCCESS};
use crate::format::envelope::{Reason, Status};
use crate::format::histogram::{self, BOUNDS_SECONDS};
use crate::format::spend::Tokens;
use crate::format::summary::{Cell, Summary};
use crate::store::queue::Reading;

/// The statuses whose oldest record is told: those in which a record waits for somebody.
const WAITING: [Status; 3] = [Status::Queued, Status::Running, Status::Human];

/// The exporter's own health.
pub(super) fn of_health(health: Health) -> Vec<MetricFamily> {
    vec![
        gauge(
            "handoff_exporter_success",
            "Whether the last run of the exporter could read everything (1) or not (0).",
            vec![sample([], f64::from(u8::from(health.success)))],
        ),
        gauge(
            LAST_SUCCESS,
            "When the exporter last could read everything, 0 if never. Alert on its age.",
            vec![sample([], health.last_success)],
        ),
        gauge(
            "handoff_exporter_duration_seconds",
            "How long the last run of the exporter took.",
            vec![sample([], health.duration)],
        ),
        gauge(
            "handoff_build_info",
            "Always 1; the version of the exporter is in the label.",
            vec![sample([("version", env!("CARGO_PKG_VERSION"))], 1.0)],
        ),
    ]
}

/// What the queue and the blob store hold.
pub(super) fn of_reading(reading: &Reading) -> Vec<MetricFamily> {
    let summary = &reading.summary;
    let mut families = of_cells(summary);
    families.extend(of_roles(summary));
    families.push(of_tokens(summary));
    families.extend([
        gauge("handoff_queue_bytes", "Size of the queue file.", vec![sample([], float(reading.queue_bytes))]),
        gauge(
            "handoff_queue_malformed_lines",
            "Lines of the queue that are no records, by reason. They are kept as they are.",
            Reason::ALL
                .into_iter()
                .map(|reason| sample([("reason", reason.as_str())], float(summary.malformed[reason as usize])))
                .collect(),
        ),
        gauge(
            "handoff_queue_oversized_records",
            "Records with a payload value over 8 KiB, which the next offload would move to the blob store.",
            vec![sample([], float(summary.oversized))],
        ),
        gauge(
            "handoff_queue_generations",
            "Earlier generations of the queue on disk that are not drained yet.",
            vec![sample([], float(reading.generations))],
        ),
    ]);
    if let Ok(blobs) = reading.blobs {
        families.extend([
            gauge("handoff_blob_objects", "Blobs in the store.", vec![sample([], float(blobs.usage.objects))]),
            gauge("handoff_blob_bytes", "Size of all blobs in the store.", vec![sample([], float(blobs.usage.bytes))]),
            gauge(
                "handoff_blob_missing_references",
                "References in the queue to blobs that are not in the store.",
                vec![sample([], float(blobs.missing_references))],
            ),
        ]);
    }
    // The registry drops families without samples by itself, but a description needs the labels of one.
    families.retain(|family| !family.get_metric().is_empty());
    families
}

fn of_cells(summary: &Summary) -> Vec<MetricFamily> {
    let by_role_and_kind = |value: fn(&Cell) -> f64| -> Vec<Sample> {
        summary.cells().map(|(role, kind, cell)| sample([("role", role), ("kind", kind)], value(cell))).collect()
    };
    let mut records = Vec::new();
    let mut finished = Vec::new();
    for (role, kind, cell) in summary.cells() {
        for status in Status::ALL {
            let count = cell.live[status as usize];
            if status != Status::Other || count > 0 {
                records.push(sample([("role", role), ("kind", kind), ("status", status.as_str())], float(count)));
            }
        }
        for (status, count) in [(Status::Done, cell.totals.done), (Status::Dead, cell.totals.dead)] {
            finished.push(sample([("role", role), ("kind", kind), ("outcome", status.as_str())], float(count)));
        }
    }
    vec![
        gauge("handoff_queue_records", "Records in the queue, by the role they are for, kind and status.", records),
        counter(
            "handoff_records_total",
            "Records ever queued, removed ones included.",
            by_role_and_kind(|cell| float(cell.totals.records)),
        ),
        counter("handoff_finished_total", "Records that are done or dead, removed ones included.", finished),
        counter(
            "handoff_nacks_total",
            "How often records were refused by their role.",
            by_role_and_kind(|cell| float(cell.totals.nacks)),
        ),
        counter(
            "handoff_spend_usd_total",
            "What the model responses cost that have a price.",
            by_role_and_kind(|cell| cell.totals.spend_usd.to_f64()),
        ),
        counter(
            "handoff_spend_unpriced_records_total",
            "Records with a model response whose cost is not known. It is missing from handoff_spend_usd_total.",
            by_role_and_kind(|cell| float(cell.totals.unpriced)),
        ),
    ]
}

fn of_roles(summary: &Summary) -> Vec<MetricFamily> {
    let roles = summary.roles();
    let mut oldest = Vec::new();
    for (role, cell) in &roles {
        for status in WAITING {
            if let Some(ts) = cell.oldest[status as usize] {
                oldest.push(sample([("role", role), ("status", status.as_str())], ts.as_seconds()));
            }
        }
    }
    let by_role = |value: fn(&Cell) -> &histogram::Histogram| -> Vec<Metric> {
        roles.iter().map(|(role, cell)| distribution([("role", role)], value(cell))).collect()
    };
    vec![
        gauge("handoff_queue_oldest_timestamp_seconds", "When the oldest record in this status was queued.", oldest),
        family(
            "handoff_queue_wait_seconds",
            "How long records waited from queued to started.",
            MetricType::HISTOGRAM,
            by_role(|cell| &cell.totals.queue_wait),
        ),
        family(
            "handoff_role_time_seconds",
            "How long roles took for records, from started to finished.",
            MetricType::HISTOGRAM,
            by_role(|cell| &cell.totals.role_time),
        ),
    ]
}

fn of_tokens(summary: &Summary) -> MetricFamily {
    let mut samples = Vec::new();
    for (kind, model, tokens) in summary.tokens() {
        for (token_type, count) in Tokens::TYPES.into_iter().zip(tokens.counts()) {
            samples.push(sample([("kind", kind), ("model", model), ("token_type", token_type)], float(count)));
        }
    }
    counter("handoff_tokens_total", "Tokens of model responses. The four types do not overlap.", samples)
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

fn distribution<const N: usize>(labels: [(&str, &str); N], observed: &histogram::Histogram) -> Metric {
    let mut cumulative = 0;
    let buckets = BOUNDS_SECONDS.iter().zip(observed.buckets).map(|(&bound, count)| {
        cumulative += count;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(float(bound));
        bucket.set_cumulative_count(cumulative);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(observed.buckets.iter().sum());
    histogram.set_sample_sum(float(observed.sum_us) / 1e6);
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

#[expect(clippy::cast_precision_loss, reason = "samples are floats; counts stay below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}
