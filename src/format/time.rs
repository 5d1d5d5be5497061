//! Points in time as the queue holds them.

use std::fmt;
use std::time::Duration;

use chrono::{DateTime, SecondsFormat};

use super::json;

/// A point in time, in microseconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(i64);

/// Numbers from here on are milliseconds: as seconds they lie past the year 5138, as milliseconds in 1973.
const FIRST_MILLISECONDS: i64 = 100_000_000_000;
/// Numbers from here on are neither.
const TOO_LARGE: i64 = 100_000_000_000_000;
const MICROS_PER_SECOND: i64 = 1_000_000;

impl Timestamp {
    /// The time that is `micros` microseconds after the epoch.
    #[must_use]
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Seconds since the epoch.
    #[must_use]
    pub fn as_seconds(self) -> f64 {
        seconds(u64::try_from(self.0).unwrap_or(0))
    }

    /// The same without the fraction.
    #[must_use]
    pub const fn whole_seconds(self) -> i64 {
        self.0.div_euclid(MICROS_PER_SECOND)
    }

    /// The time that lies `age` before this one, or the earliest there is.
    #[must_use]
    pub fn before(self, age: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(age.as_micros()).unwrap_or(i64::MAX)))
    }

    /// Reads an RFC 3339 time from 1970 to before 1e11 seconds after it.
    #[must_use]
    pub fn from_rfc3339(text: &str) -> Option<Self> {
        // chrono would also take a minus sign that isn't ASCII.
        let time = text.is_ascii().then(|| DateTime::parse_from_rfc3339(text).ok())??;
        let rounded_up = i64::from(time.timestamp_subsec_nanos() % 1_000 >= 500);
        let micros = time.timestamp_micros() + rounded_up;
        let end = FIRST_MILLISECONDS * MICROS_PER_SECOND;
        (0..end).contains(&micros).then_some(Self(micros))
    }

    /// As a number of JSON: seconds since the epoch.
    #[must_use]
    pub fn to_json(self) -> String {
        let (seconds, micros) = (self.whole_seconds(), self.0.rem_euclid(MICROS_PER_SECOND));
        if micros == 0 { seconds.to_string() } else { format!("{seconds}.{micros:06}") }
    }

    /// Reads a time from one valid JSON value.
    #[must_use]
    pub fn from_json(json: &str) -> Option<Self> {
        match json.as_bytes().first()? {
            b'"' => Self::from_rfc3339(&json::string(json)?.text),
            b'-' | b'0'..=b'9' => Self::from_number(json),
            _ => None,
        }
    }

    fn from_number(number: &str) -> Option<Self> {
        Self::from_decimal(number.as_bytes()).or_else(|| Self::from_float(number.parse().ok()?))
    }

    /// Exact, because a double holds a time of today to a quarter of a microsecond only.
    fn from_decimal(number: &[u8]) -> Option<Self> {
        let (whole, count) = leading_digits(number, 15);
        let fraction = match &number[count..] {
            [] => &[],
            [b'.', fraction @ ..] => fraction,
            _ => return None,
        };
        if !(1..=14).contains(&count) {
            return None;
        }
        let places = if whole < FIRST_MILLISECONDS { 6 } else { 3 };
        let (value, count) = leading_digits(fraction, places);
        let finer = &fraction[count..];
        if !finer.iter().all(u8::is_ascii_digit) {
            return None;
        }
        let micros = whole * POWERS_OF_TEN[places] + value * POWERS_OF_TEN[places - count];
        Some(Self(micros + i64::from(finer.first().is_some_and(|digit| *digit >= b'5'))))
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "at most 1e17, checked before")]
    fn from_float(number: f64) -> Option<Self> {
        if (0.0..FIRST_MILLISECONDS as f64).contains(&number) {
            Some(Self((number * 1e6).round() as i64))
        } else if (FIRST_MILLISECONDS as f64..TOO_LARGE as f64).contains(&number) {
            Some(Self((number * 1e3).round() as i64))
        } else {
            None
        }
    }
}

impl fmt::Display for Timestamp {
    /// As in RFC 3339, to the second.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match DateTime::from_timestamp_micros(self.0) {
            Some(time) => f.write_str(&time.to_rfc3339_opts(SecondsFormat::Secs, true)),
            None => write!(f, "{} s after the epoch", self.whole_seconds()),
        }
    }
}

const POWERS_OF_TEN: [i64; 7] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];

/// The number that the first digits make, `most` at most, and how many they are.
fn leading_digits(text: &[u8], most: usize) -> (i64, usize) {
    let (mut number, mut count) = (0, 0);
    for byte in text.iter().take(most).take_while(|byte| byte.is_ascii_digit()) {
        number = number * 10 + i64::from(byte - b'0');
        count += 1;
    }
    (number, count)
}

/// The float nearest to so many microseconds, in seconds.
#[must_use]
pub fn seconds(micros: u64) -> f64 {
    // Through the decimal text: a division would round the number of microseconds first.
    format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000).parse().unwrap_or(f64::MAX)
}

/// How long it took from `start` to `end`, in microseconds, if that can be told at `now`.
///
/// `None` if the end lies in the future, or so long before the start that the clock was set in between.
#[must_use]
pub fn interval(start: Timestamp, end: Timestamp, now: Timestamp) -> Option<u64> {
    if end > now {
        return None;
    }
    let micros = end.0.saturating_sub(start.0);
    // Some writers truncate to whole seconds, some don't.
    if micros > -MICROS_PER_SECOND { u64::try_from(micros.max(0)).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_the_same_moment() {
        for json in [
            "1764400000",
            "1764400000.0",
            "1.7644e9",
            "1764400000000",
            "\"2025-11-29T07:06:40Z\"",
            "\"2025-11-29T08:06:40.000+01:00\"",
            r#""2025-11-29\u005407:06:40Z""#,
        ] {
            assert_eq!(Timestamp::from_json(json), Some(Timestamp(1_764_400_000_000_000)), "{json}");
        }
    }

    #[test]
    fn microseconds_are_kept() {
        assert_eq!(Timestamp::from_json("1764400000.123457"), Some(Timestamp(1_764_400_000_123_457)));
        assert_eq!(Timestamp::from_json("1764400000123.457"), Some(Timestamp(1_764_400_000_123_457)));
        assert_eq!(Timestamp::from_json("\"2025-11-29T07:06:40.1234567Z\""), Some(Timestamp(1_764_400_000_123_457)));
        for (json, micros) in [
            ("1764400010.0000004", 1_764_400_010_000_000),
            ("1764400010.0000005", 1_764_400_010_000_001),
            ("1764400010.9444904", 1_764_400_010_944_490),
            ("1764400010000.0004", 1_764_400_010_000_000),
            ("99999999999.9999994", 99_999_999_999_999_999),
            ("99999999999999", 99_999_999_999_999_000),
            ("1.5", 1_500_000),
        ] {
            assert_eq!(Timestamp::from_json(json), Some(Timestamp(micros)), "{json}");
        }
        assert_eq!(Timestamp::from_json("0"), Some(Timestamp(0)));
        assert_eq!(Timestamp::from_json("-0"), Some(Timestamp(0)));
        assert_eq!(Timestamp::from_json("99999999999"), Some(Timestamp(99_999_999_999_000_000)));
        assert_eq!(Timestamp::from_json("100000000000"), Some(Timestamp(100_000_000_000_000)));
    }

    #[test]
    fn what_is_no_time() {
        for json in [
            "-1",
            "1e14",
            "1e400",
            "123456789012345678901234567890",
            "null",
            "true",
            "[]",
            "{}",
            "\"\"",
            "\"1764400000\"",
            "\"2025-11-29\"",
            "\"2025-11-29T07:06:40\"",
            "\"1969-12-31T23:59:59Z\"",
            "\"9999-01-01T00:00:00Z\"",
            "\"2025-02-30T00:00:00Z\"",
        ] {
            assert_eq!(Timestamp::from_json(json), None, "{json}");
        }
    }

    #[test]
    fn intervals() {
        let at = |seconds: i64| Timestamp(seconds * MICROS_PER_SECOND);
        assert_eq!(interval(at(100), at(160), at(160)), Some(60_000_000));
        assert_eq!(interval(at(100), at(161), at(160)), None);
        assert_eq!(interval(Timestamp(100_999_999), at(100), at(160)), Some(0));
        assert_eq!(interval(at(101), at(100), at(160)), None);
    }
}
