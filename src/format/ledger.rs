//! The tools' own line in the queue: what the removed records amounted to, and how far earlier
//! generations have been taken over.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::envelope::{Malformed, Reason};
use super::histogram::Histogram;
use super::json::Document;
use super::money::Usd;
use super::spend::Tokens;

/// A ledger line's payload.
#[derive(Debug, Default, PartialEq, Eq, serde::Deserialize)]
pub struct Ledger {
    /// What the removed records amounted to.
    #[serde(deserialize_with = "object")]
    pub totals: LedgerTotals,
    /// For each earlier generation still on disk, how many of its bytes have been taken over.
    pub generations: BTreeMap<u64, u64>,
}

/// What the removed records amounted to.
#[derive(Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct LedgerTotals {
    /// By role and kind.
    pub cells: Vec<LedgerCell>,
    /// By kind and model.
    pub tokens: Vec<LedgerTokens>,
    /// How many bytes their lines took.
    pub reclaimed_bytes: u64,
}

/// What the removed records of one role and kind amounted to.
#[derive(Debug, PartialEq, Eq, serde::Deserialize)]
pub struct LedgerCell {
    /// The role.
    pub role: String,
    /// The kind.
    pub kind: String,
    /// The amounts.
    #[serde(flatten)]
    pub totals: Totals,
}

/// The tokens that the removed records of one kind used of one model.
#[derive(Debug, PartialEq, Eq, serde::Deserialize)]
pub struct LedgerTokens {
    /// The kind.
    pub kind: String,
    /// The model.
    pub model: String,
    /// The counts.
    #[serde(flatten)]
    pub tokens: Tokens,
}

/// What records amount to: all that a counter or histogram needs of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct Totals {
    /// How many there are.
    pub records: u64,
    /// How many of them are `done`.
    pub done: u64,
    /// How many of them are `dead`.
    pub dead: u64,
    /// How often they were refused.
    pub nacks: u64,
    /// From queued to started.
    #[serde(deserialize_with = "object")]
    pub queue_wait: Histogram,
    /// From started to finished.
    #[serde(deserialize_with = "object")]
    pub role_time: Histogram,
    /// What their priced model responses cost.
    pub spend_usd: Usd,
    /// How many have a model response without a price.
    pub unpriced: u64,
}

impl Totals {
    /// Adds the other's amounts.
    pub fn merge(&mut self, other: &Self) {
        self.records = self.records.saturating_add(other.records);
        self.done = self.done.saturating_add(other.done);
        self.dead = self.dead.saturating_add(other.dead);
        self.nacks = self.nacks.saturating_add(other.nacks);
        self.queue_wait.merge(&other.queue_wait);
        self.role_time.merge(&other.role_time);
        self.spend_usd = self.spend_usd.saturating_add(other.spend_usd);
        self.unpriced = self.unpriced.saturating_add(other.unpriced);
    }
}

/// Reads a struct from an object only. A derived implementation would also take an array of its fields.
fn object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct Object<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }
    deserializer.deserialize_map(Object(PhantomData))
}

impl Ledger {
    const VERSION: &str = "1";
    /// Far more than all cells that there can be. Without a limit a damaged line could take many times its length in memory.
    const MAX_BYTES: usize = 4 * 1024 * 1024;

    /// Reads the payload of a ledger line.
    pub(super) fn read(payload: &str) -> Result<Self, Malformed> {
        let version = Document::new(payload)
            .object::<1>(|key| (key == b"version").then_some(0))
            .ok()
            .and_then(|members| members.get(0));
        match version {
            Some(Self::VERSION) if payload.len() > Self::MAX_BYTES => {
                Err(Malformed::new(Reason::NotAnEnvelope, "unreadable ledger: it is too long"))
            }
            // What serde has to say may quote the line, and at any length.
            Some(Self::VERSION) => serde_json::from_str(payload).map_err(|error| {
                let detail = format!("unreadable ledger: byte {} of its payload doesn't fit", error.column());
                Malformed::new(Reason::NotAnEnvelope, detail)
            }),
            Some(number) if number.strip_prefix('-').unwrap_or(number).bytes().all(|b| b.is_ascii_digit()) => {
                Err(Malformed::new(Reason::UnsupportedVersion, "the ledger's `version` is not 1"))
            }
            _ => Err(Malformed::new(Reason::NotAnEnvelope, "unreadable ledger: its `version` is no integer")),
        }
    }
}
