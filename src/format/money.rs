//! Money, exact.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An amount of US dollars: a whole number of 10⁻²⁸ dollars, so that sums never round.
///
/// (Decimal types with a floating exponent round without a word when a sum needs more digits than they have.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Usd(u128);

const DECIMALS: i64 = 28;
const ONE: u128 = 10_u128.pow(28);

impl Usd {
    /// Nothing.
    pub const ZERO: Self = Self(0);
    /// The most that one reported cost may be: 10⁹ USD.
    pub const MAX_COST: Self = Self(1_000_000_000 * ONE);

    /// Reads a JSON number that is not negative, needs no more than 28 decimal places, and is below 3.4e10.
    #[must_use]
    pub fn parse(number: &str) -> Option<Self> {
        Self::parse_plain(number).or_else(|| Self::parse_any(number))
    }

    /// The form that nearly every amount has: `0.0375`, with up to 18 decimals.
    fn parse_plain(number: &str) -> Option<Self> {
        let [b'0', b'.', fraction @ ..] = number.as_bytes() else { return None };
        if !(1..=18).contains(&fraction.len()) {
            return None;
        }
        let digit = |n: u64, b: &u8| b.is_ascii_digit().then(|| n * 10 + u64::from(b - b'0'));
        let value = fraction.iter().try_fold(0, digit)?;
        let scale = 10_u128.pow(28 - u32::try_from(fraction.len()).ok()?);
        Some(Self(u128::from(value) * scale))
    }

    fn parse_any(number: &str) -> Option<Self> {
        let (negative, number) = match number.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, number),
        };
        let (mantissa, exponent) = match number.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, Some(exponent)),
            None => (number, None),
        };
        let (whole, fraction) = match mantissa.split_once('.') {
            Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
            Some(_) => return None,
            None => (mantissa, ""),
        };
        if whole.is_empty() || (whole.len() > 1 && whole.starts_with('0')) {
            return None;
        }
        let exponent_is_number = exponent.is_none_or(|e| {
            let digits = e.strip_prefix(['+', '-']).unwrap_or(e);
            !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
        });
        if !exponent_is_number || !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit()) {
            return None;
        }

        // `significant` × 10^`zeros` are the digits read so far, so that trailing zeros never overflow.
        let (mut significant, mut zeros) = (0_u128, 0_u32);
        for digit in whole.bytes().chain(fraction.bytes()).map(|b| u128::from(b - b'0')) {
            if digit == 0 {
                zeros = zeros.saturating_add(u32::from(significant != 0));
            } else {
                significant =
                    significant.checked_mul(10_u128.checked_pow(zeros.saturating_add(1))?)?.checked_add(digit)?;
                zeros = 0;
            }
        }
        if significant == 0 {
            return Some(Self::ZERO);
        }
        if negative {
            return None;
        }
        let exponent: i64 = exponent.map_or(Some(0), |e| e.parse().ok())?;
        let scale = exponent
            .checked_sub(i64::try_from(fraction.len()).ok()?)?
            .checked_add(i64::from(zeros))?
            .checked_add(DECIMALS)?;
        let factor = 10_u128.checked_pow(u32::try_from(scale).ok()?)?;
        Some(Self(significant.checked_mul(factor)?))
    }

    /// The sum, unless it is too large to be held exactly.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The sum, or the largest amount that can be held.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// This price times `count`, unless it is too large to be held exactly.
    #[must_use]
    pub fn checked_mul(self, count: u64) -> Option<Self> {
        self.0.checked_mul(u128::from(count)).map(Self)
    }

    /// The nearest float, for a metric's sample.
    #[must_use]
    pub fn to_f64(self) -> f64 {
        // Through the decimal text, which parses to the nearest float; a division would round twice.
        self.to_string().parse().unwrap_or(f64::MAX)
    }
}

impl fmt::Display for Usd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, fraction) = (self.0 / ONE, self.0 % ONE);
        if fraction == 0 {
            return write!(f, "{whole}");
        }
        let digits = format!("{fraction:028}");
        write!(f, "{whole}.{}", digits.trim_end_matches('0'))
    }
}

impl Serialize for Usd {
    /// As a decimal in a string.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Usd {
    /// From a decimal in a string.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom("not an amount of USD"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(number: &str) -> Option<String> {
        Usd::parse(number).map(|usd| usd.to_string())
    }

    #[test]
    fn numbers_keep_every_digit() {
        for (number, expected) in [
            ("0", "0"),
            ("-0.0", "0"),
            ("0e999999999999999999999", "0"),
            ("0.1", "0.1"),
            ("0.999999999999999999", "0.999999999999999999"),
            ("0.9999999999999999999", "0.9999999999999999999"),
            ("1.5", "1.5"),
            ("0.1000", "0.1"),
            ("1E+3", "1000"),
            ("1.5e-07", "0.00000015"),
            ("3.4500000000000004e-04", "0.00034500000000000004"),
            ("1000000000", "1000000000"),
            ("1e-28", "0.0000000000000000000000000001"),
            ("100e-30", "0.0000000000000000000000000001"),
            ("33000000000.5", "33000000000.5"),
        ] {
            assert_eq!(shown(number).as_deref(), Some(expected), "{number}");
        }
    }

    #[test]
    fn what_cannot_be_held_exactly_or_is_no_number_is_refused() {
        for number in [
            "-1",
            "-1e-9",
            "1e-29",
            "1.00000000000000000000000000001",
            "1e11",
            "1e400",
            "",
            ".5",
            "5.",
            "1e",
            "1e+",
            "01",
            "+1",
            "1 ",
            " 1",
            "NaN",
            "0x1",
            "1_000",
            "١",
            "1e99999999999999999999",
            "--1",
            "1e5.0",
        ] {
            assert_eq!(shown(number), None, "{number}");
        }
    }

    #[test]
    fn a_sum_is_exact_where_floats_are_not() {
        let cent = Usd::parse("0.1").unwrap_or_default();
        let sum = (0..10).try_fold(Usd::ZERO, |sum, _| sum.checked_add(cent));
        assert_eq!(sum.map(|s| s.to_string()).as_deref(), Some("1"));
        assert_eq!(sum.map(Usd::to_f64), Some(1.0));
        assert_eq!(Usd::MAX_COST.checked_mul(1_000), None);
    }
}
