//! A bounded set of label values: whatever a queue holds, it cannot make more series than this.

/// How many distinct values a set learns.
pub const MAX_LEARNED: usize = 50;
/// The longest value that stands for itself, in bytes.
pub const MAX_BYTES: usize = 128;
/// The value that stands for all that have no place of their own.
pub const OTHER: &str = "other";

/// A value's place in its set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label(u16);

impl Label {
    /// The place of [`OTHER`].
    pub const OTHER: Self = Self(u16::MAX);
}

/// A set of label values that is either configured or learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    values: Vec<String>,
    /// Values that have a place whenever they are met.
    reserved: Vec<String>,
    /// Whether it takes no others.
    configured: bool,
    /// Whether a value went to [`OTHER`] because the set was full: the result then depends on the order of values.
    pub overflowed: bool,
}

impl Labels {
    /// A set that learns the first [`MAX_LEARNED`] values, and the reserved ones whenever they are met.
    #[must_use]
    pub fn learning(reserved: &[String]) -> Self {
        Self { values: Vec::new(), reserved: reserved.to_vec(), configured: false, overflowed: false }
    }

    /// A set of just these values or, if there are none, one that learns.
    #[must_use]
    pub fn new(configured: &[String]) -> Self {
        let mut labels = Self::learning(&[]);
        for value in configured {
            if let Some(Place::New(clean)) = labels.find(value) {
                labels.insert(clean);
            }
        }
        labels.configured = !configured.is_empty();
        labels
    }

    /// Whether the set was configured.
    #[must_use]
    pub fn is_configured(&self) -> bool {
        self.configured
    }

    /// The place of `value`, which may be that of [`OTHER`].
    pub fn intern(&mut self, value: &str) -> Label {
        match self.find(value) {
            Some(Place::Known(label)) => label,
            Some(Place::New(clean)) if !self.configured => {
                if self.values.len() >= MAX_LEARNED && !self.reserved.contains(&clean) {
                    self.overflowed = true;
                    return Label::OTHER;
                }
                self.insert(clean)
            }
            _ => Label::OTHER,
        }
    }

    /// Interns all values of another set, in their order.
    pub fn intern_all(&mut self, other: &Self) {
        for value in &other.values {
            self.intern(value);
        }
    }

    /// The values in the order in which they were met.
    #[must_use]
    pub fn values(&self) -> &[String] {
        &self.values
    }

    /// Looks for a value, cleaned; `None` for one that can only be [`OTHER`].
    fn find(&self, value: &str) -> Option<Place> {
        // The usual case first: known, and clean as it stands.
        if let Some(label) = self.position(value) {
            return Some(Place::Known(label));
        }
        if value.len() > MAX_BYTES {
            return None;
        }
        let clean: String =
            value.chars().map(|c| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect();
        if clean.len() > MAX_BYTES || clean == OTHER {
            return None;
        }
        Some(self.position(&clean).map_or(Place::New(clean), Place::Known))
    }

    /// The value at a place.
    #[must_use]
    pub fn get(&self, label: Label) -> &str {
        self.values.get(usize::from(label.0)).map_or(OTHER, String::as_str)
    }

    /// All places, without that of [`OTHER`].
    pub fn iter(&self) -> impl Iterator<Item = Label> + use<> {
        (0..u16::try_from(self.values.len()).unwrap_or(u16::MAX)).map(Label)
    }

    fn position(&self, value: &str) -> Option<Label> {
        let index = self.values.iter().position(|known| known == value)?;
        u16::try_from(index).ok().map(Label)
    }

    fn insert(&mut self, clean: String) -> Label {
        match u16::try_from(self.values.len()) {
            Ok(index) if Label(index) != Label::OTHER => {
                self.values.push(clean);
                Label(index)
            }
            _ => Label::OTHER,
        }
    }
}

/// Where a value is in a set.
enum Place {
    Known(Label),
    /// Nowhere yet; what it would be called.
    New(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_learning_set_stops_at_its_limit() {
        let mut labels = Labels::new(&[]);
        for n in 0..1_000 {
            labels.intern(&format!("role-{n}"));
        }
        assert!(labels.overflowed);
        assert_eq!(labels.iter().count(), MAX_LEARNED);
        let (last, beyond) = (labels.intern("role-49"), labels.intern("role-50"));
        assert_eq!((labels.get(last), labels.get(beyond)), ("role-49", OTHER));
    }

    #[test]
    fn a_configured_set_learns_nothing() {
        let mut labels = Labels::new(&["a", "a", "other"].map(str::to_owned));
        assert_eq!(labels.iter().count(), 1);
        let (known, unknown) = (labels.intern("a"), labels.intern("b"));
        assert_eq!((labels.get(known), labels.get(unknown)), ("a", OTHER));
        assert!(!labels.overflowed);
    }

    #[test]
    fn values_are_cleaned_before_they_are_compared() {
        let mut labels = Labels::new(&[]);
        let cleaned = labels.intern("a\r\u{1b}\n");
        assert_eq!(labels.get(cleaned), "a\u{fffd}\u{fffd}\n");
        assert_eq!(labels.intern("a\0\0\n"), cleaned);
        let (long, longest) = (labels.intern(&"é".repeat(65)), labels.intern(&"é".repeat(64)));
        assert_eq!((labels.get(long), labels.get(longest).len()), (OTHER, MAX_BYTES));
        let longer_when_clean = labels.intern(&"\u{1}".repeat(60));
        assert_eq!(labels.get(longer_when_clean), OTHER);
        let other = labels.intern(OTHER);
        assert_eq!(other, long);
    }
}
