//! The tools' own line in the queue: what the removed records amounted to, and how far earlier
//! generations have been taken over.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::histogram::Histogram;
use super::json::{self, Document};
use super::labels::{Label, Labels, MAX_LEARNED, OTHER};
use super::malformed::{Malformed, Reason};
use super::money::Usd;
use super::spend::Tokens;
use super::time::Timestamp;

/// A line that begins like a ledger is read up to this length, whatever the limit is.
pub const MAX_LEDGER_LINE: usize = 5 * 1024 * 1024;
/// So many bytes of a line tell whether it begins like a ledger.
pub const LEDGER_START: usize = 64;

/// Whether a line begins like a ledger: as the tools write it, as a worker does that writes every line anew, or damaged.
#[must_use]
pub fn begins_like_ledger(line: &[u8]) -> bool {
    let start = &line[..line.len().min(LEDGER_START)];
    let without_space: Vec<u8> = start.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
    memchr::memmem::find(&without_space, br#""id":"ledger","#).is_some()
}

/// A ledger line's payload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ledger {
    /// What the removed records amounted to.
    pub totals: LedgerTotals,
    /// For each earlier generation still on disk, how many of its bytes have been taken over.
    pub generations: BTreeMap<u64, u64>,
}

/// What the removed records amounted to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LedgerTotals {
    /// The first roles that the queue has shown, removed records or not, in their order of appearance.
    pub roles: Vec<String>,
    /// The same for kinds.
    pub kinds: Vec<String>,
    /// The same for models.
    pub models: Vec<String>,
    /// By role and kind.
    pub cells: Vec<LedgerCell>,
    /// By kind and model.
    pub tokens: Vec<LedgerTokens>,
    /// How many bytes their lines took.
    pub reclaimed_bytes: u64,
}

impl LedgerTotals {
    /// Far more than metrics show, and few enough for a ledger that can be read.
    const MAX_CELLS: usize = 2_000;

    /// Adds amounts that no record shows any more.
    pub fn add(&mut self, role: &str, kind: &str, amounts: &Totals) {
        let [mut role, mut kind] = [(&mut self.roles, role), (&mut self.kinds, kind)].map(|(names, name)| {
            let mut labels = Labels::learning(&[]);
            let label = labels.intern(name);
            let name = labels.get(label);
            if label != Label::OTHER && names.len() < MAX_LEARNED && !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
            name.to_owned()
        });
        let find = |cells: &[LedgerCell], role: &str, kind: &str| {
            cells.iter().position(|cell| cell.role == role && cell.kind == kind)
        };
        let mut known = find(&self.cells, &role, &kind);
        if known.is_none() && self.cells.len() >= Self::MAX_CELLS {
            (role, kind) = (OTHER.to_owned(), OTHER.to_owned());
            known = find(&self.cells, &role, &kind);
        }
        match known.and_then(|known| self.cells.get_mut(known)) {
            Some(cell) => cell.totals.merge(amounts),
            None => self.cells.push(LedgerCell { role, kind, totals: amounts.clone() }),
        }
    }
}

/// What the removed records of one role and kind amounted to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
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

impl LedgerTotals {
    /// What can't be so, however records came and went.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for LedgerCell { role, kind, totals } in &self.cells {
            let mut fault =
                |what: String| faults.push(format!("the totals of role {role} and kind {kind} can't be so: {what}"));
            for (name, number) in [("done", totals.done), ("unpriced", totals.unpriced)] {
                if number > totals.records {
                    fault(format!("{number} are {name}, of {} records", totals.records));
                }
            }
            for (name, histogram) in [("queue_wait", &totals.queue_wait), ("role_time", &totals.role_time)] {
                if !histogram.is_plausible() {
                    fault(format!("the buckets of {name} don't make its sum"));
                }
            }
        }
        faults
    }
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

/// Adds the offsets of another ledger: of each generation the largest counts.
pub(crate) fn merge_generations(generations: &mut BTreeMap<u64, u64>, more: &BTreeMap<u64, u64>) {
    for (&generation, &offset) in more {
        let known = generations.entry(generation).or_default();
        *known = offset.max(*known);
    }
}

impl Ledger {
    const VERSION: &str = "1";
    /// Far more than all cells that there can be. Without a limit a damaged line could take many times its length in memory.
    const MAX_BYTES: usize = 4 * 1024 * 1024;

    /// How many records were removed.
    #[must_use]
    pub fn removed_records(&self) -> u64 {
        self.totals.cells.iter().fold(0, |sum, cell| cell.totals.records.saturating_add(sum))
    }

    /// The line that holds it, with its `\n`; `None` if it would be too long to be read again.
    #[must_use]
    pub fn to_line(&self, now: Timestamp) -> Option<String> {
        #[derive(Serialize)]
        struct Payload<'a> {
            version: u8,
            #[serde(flatten)]
            ledger: &'a Ledger,
        }
        let payload = json::compact(&serde_json::to_string(&Payload { version: 1, ledger: self }).ok()?);
        (payload.len() <= Self::MAX_BYTES).then(|| {
            let ts = now.whole_seconds();
            format!(
                "{{\"id\":\"ledger\",\"ts\":{ts},\"kind\":\"ledger\",\"from\":\"handoff\",\"to\":\"\",\"payload\":{payload},\"status\":\"ledger\"}}\n"
            )
        })
    }

    /// Reads the payload of a ledger line.
    pub(super) fn read(payload: &str) -> Result<Self, Malformed> {
        let members = Document::new(payload).object::<1>(|key| (key == b"version").then_some(0)).ok();
        let version = members.as_ref().filter(|members| !members.duplicates).and_then(|members| members.get(0));
        let unreadable = |what| Err(Malformed::ledger(Reason::NotAnEnvelope, what));
        match version {
            Some(Self::VERSION) if payload.len() > Self::MAX_BYTES => unreadable("unreadable ledger: it is too long"),
            // What serde has to say may quote the line, and at any length.
            Some(Self::VERSION) => Self::parse(payload)
                .or_else(|_| unreadable("unreadable ledger: its payload does not have the format's shape")),
            Some(number) if number.strip_prefix('-').unwrap_or(number).bytes().all(|b| b.is_ascii_digit()) => {
                Err(Malformed::ledger(Reason::UnsupportedVersion, "the ledger's `version` is not 1"))
            }
            _ => unreadable("unreadable ledger: it does not have one integer `version`"),
        }
    }

    fn parse(payload: &str) -> serde_json::Result<Self> {
        let stored: StoredLedger<'_> = from_object(payload)?;
        let totals: StoredTotals<'_> = from_object(stored.totals.get())?;
        let cell = |json: &&RawValue| {
            let StoredCell { role, kind } = from_object(json.get())?;
            Ok(LedgerCell { role, kind, totals: from_object(json.get())? })
        };
        let tokens = |json: &&RawValue| {
            let StoredTokens { kind, model } = from_object(json.get())?;
            Ok(LedgerTokens { kind, model, tokens: from_object(json.get())? })
        };
        Ok(Self {
            totals: LedgerTotals {
                roles: totals.roles,
                kinds: totals.kinds,
                models: totals.models,
                cells: totals.cells.iter().map(cell).collect::<serde_json::Result<_>>()?,
                tokens: totals.tokens.iter().map(tokens).collect::<serde_json::Result<_>>()?,
                reclaimed_bytes: totals.reclaimed_bytes,
            },
            generations: stored.generations,
        })
    }
}

// The parts of a payload as they are stored. A cell is read twice, for its names and for its amounts: serde could flatten one into the
// other, but would then hold whatever else is in it.

#[derive(Deserialize)]
struct StoredLedger<'a> {
    #[serde(borrow)]
    totals: &'a RawValue,
    #[serde(deserialize_with = "offsets")]
    generations: BTreeMap<u64, u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StoredTotals<'a> {
    roles: Vec<String>,
    kinds: Vec<String>,
    models: Vec<String>,
    #[serde(borrow)]
    cells: Vec<&'a RawValue>,
    #[serde(borrow)]
    tokens: Vec<&'a RawValue>,
    reclaimed_bytes: u64,
}

#[derive(Deserialize)]
struct StoredCell {
    role: String,
    kind: String,
}

#[derive(Deserialize)]
struct StoredTokens {
    kind: String,
    model: String,
}

fn from_object<'a, T: Deserialize<'a>>(json: &'a str) -> serde_json::Result<T> {
    object(&mut serde_json::Deserializer::from_str(json))
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

/// Reads offsets by generation, each of which may stand there once.
fn offsets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<u64, u64>, D::Error> {
    struct Offsets;
    impl<'de> Visitor<'de> for Offsets {
        type Value = BTreeMap<u64, u64>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut offsets = BTreeMap::new();
            while let Some((generation, offset)) = map.next_entry()? {
                if offsets.insert(generation, offset).is_some() {
                    return Err(A::Error::custom("a generation stands there twice"));
                }
            }
            Ok(offsets)
        }
    }
    deserializer.deserialize_map(Offsets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_read(payload: &str) -> bool {
        Ledger::read(payload).is_ok()
    }

    #[test]
    fn amounts_are_added_to_the_cell_of_their_names_and_others_stay() {
        let mut totals = LedgerTotals::default();
        let one = Totals { nacks: 1, ..Totals::default() };
        for n in 0..60 {
            totals.add(&format!("r{n}"), "k", &one);
        }
        totals.add("r59", "k", &one);
        totals.add(&"x".repeat(129), "k", &one);
        let nacks =
            |role: &str| totals.cells.iter().filter(|cell| cell.role == role).map(|cell| cell.totals.nacks).sum();
        let counts: [u64; 4] = ["r0", "r58", "r59", "other"].map(nacks);
        assert_eq!((counts, totals.roles.len(), totals.kinds.len()), ([1, 1, 2, 1], 50, 1));
        for n in 0..3_000 {
            totals.add("r", &format!("k{n}"), &one);
        }
        assert_eq!(totals.cells.iter().map(|cell| cell.totals.nacks).sum::<u64>(), 3_062);
        assert!(totals.cells.len() <= LedgerTotals::MAX_CELLS + 1);
    }

    #[test]
    fn what_stands_twice_is_refused_and_what_is_unknown_is_passed_over() {
        let with = |cell: &str, generations: &str| {
            format!(
                r#"{{"version":1,"totals":{{"cells":[{{"role":"r","kind":"k"{cell}}}]}},"generations":{{{generations}}}}}"#
            )
        };
        assert!(is_read(&with("", r#""7":1,"8":5"#)));
        assert!(!is_read(&with("", r#""7":1,"7":5"#)));
        assert!(!is_read(&with(r#","records":1,"records":2"#, "")));
        assert!(!is_read(&with(r#","role":"s""#, "")));
        assert!(!is_read(r#"{"version":1,"version":1,"totals":{},"generations":{}}"#));
        let deep = format!(r#","new":{}{}"#, "[".repeat(200), "]".repeat(200));
        for unknown in [deep.as_str(), r#","new":1e400"#, r#","new":"\ud800""#] {
            assert!(is_read(&with(unknown, "")), "{unknown}");
        }
        for shape in [r#","queue_wait":[[0],1]"#, r#","records":-1"#, r#","spend_usd":0.5"#] {
            assert!(!is_read(&with(shape, "")), "{shape}");
        }
        assert!(!is_read(r#"{"version":1,"totals":[],"generations":{}}"#));
        assert!(!is_read(r#"{"version":1,"totals":{"cells":[["r","k"]]},"generations":{}}"#));
    }
}
