//! What people read: ages, columns, and text that no terminal obeys.

use std::fmt::Write;
use std::iter;

use super::args::Pricing;
use super::job::count;
use super::messages::one_line;
use crate::format::cause::Cause;
use crate::format::money::Usd;
use crate::format::offload;
use crate::format::owner::Owner;
use crate::format::summary::Parameters;
use crate::format::time::Timestamp;
use crate::store::Error;
use crate::store::process::Life;

/// How long ago something was, in two units at most.
pub(super) fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.whole_seconds() - then.whole_seconds();
    if seconds < 0 { format!("in {}", span(seconds.unsigned_abs())) } else { span(seconds.unsigned_abs()) }
}

fn span(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{minutes}m"),
        3_600..86_400 => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

/// A time and how long ago it was.
pub(super) fn time(then: Timestamp, now: Timestamp) -> String {
    let age = age(then, now);
    if then > now { format!("{then} ({age})") } else { format!("{then} ({age} ago)") }
}

/// At most so many characters of a text, in one line.
pub(super) fn beginning(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => one_line(text.get(..end).unwrap_or_default()) + "…",
        None => one_line(text),
    }
}

/// An id in a row: whatever somebody has put there, it must leave room on the screen.
pub(super) fn id(text: &str) -> String {
    beginning(text, 100)
}

/// The name of a role or a kind in a row.
pub(super) fn name(text: &str) -> String {
    beginning(text, 40)
}

/// By which rules costs are counted, as in metrics.
pub(super) fn parameters(pricing: &Pricing, now: Timestamp) -> Result<Parameters, Error> {
    let prices = pricing.read()?;
    Ok(Parameters { now, roles: Vec::new(), kinds: Vec::new(), prices, offload: offload::Rule::default() })
}

/// Why a record was refused or has stopped.
pub(super) fn cause(cause: &Cause<'_>, now: Timestamp) -> String {
    let mut words = cause.ts.map_or_else(|| "at a time unknown".to_owned(), |ts| time(ts, now));
    if let Some(by) = &cause.by {
        let _ = write!(words, " by {by}");
    }
    if let Some(class) = &cause.error_class {
        let _ = write!(words, ", {class}");
    }
    if cause.retryable == Some(false) {
        words += ", not to be tried again";
    }
    if let Some(reason) = &cause.reason {
        let _ = write!(words, ": {reason}");
    }
    words
}

/// Columns that are as wide as the widest cell, but no wider than one that pushes others off the screen.
#[derive(Debug, Default)]
pub(super) struct Columns(Vec<usize>);

impl Columns {
    const WIDEST: usize = 40;

    /// Makes room for a row.
    pub(super) fn fit(&mut self, row: &[impl AsRef<str>]) {
        self.0.resize(self.0.len().max(row.len()), 0);
        for (width, cell) in self.0.iter_mut().zip(row) {
            *width = cell.as_ref().chars().count().min(Self::WIDEST).max(*width);
        }
    }

    /// Lays out a row, which may have more cells.
    pub(super) fn line(&self, row: &[impl AsRef<str>]) -> String {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(self.0.iter().chain(iter::repeat(&0))) {
            let cell = cell.as_ref();
            // Numbers stand one below the other.
            let is_number = cell.bytes().all(|byte| byte.is_ascii_digit());
            let _ = if is_number { write!(line, "{cell:>width$}  ") } else { write!(line, "{cell:width$}  ") };
        }
        line.truncate(line.trim_end().len());
        line.push('\n');
        line
    }
}

/// Lays out rows.
pub(super) fn table(rows: &[Vec<String>], indent: &str) -> String {
    let mut columns = Columns::default();
    for row in rows {
        columns.fit(row);
    }
    rows.iter().flat_map(|row| [indent.to_owned(), columns.line(row)]).collect()
}

/// A record's line as a line of JSON.
pub(super) fn json_line(line: &[u8]) -> Vec<u8> {
    let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
    [line.trim_ascii(), b"\n"].concat()
}

/// A record's owner, and whether it lives.
pub(super) fn owner(json: &str, life: Life) -> String {
    match Owner::read(json) {
        Some(Owner { pid, host, .. }) => one_line(&format!("{}: process {pid} on {host}", life.as_str())),
        None => format!("unknown: {}", beginning(json, 60)),
    }
}

/// What was spent, as far as that is known.
pub(super) fn spend(usd: Usd, unpriced: u64) -> String {
    match unpriced {
        0 => format!("{usd} USD"),
        _ => format!("≥ {usd} USD, {} unpriced", count(unpriced, "record")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_two_units() {
        let at = |seconds: i64| Timestamp::from_micros(seconds * 1_000_000);
        let ages = [0, 59, 60, 3_599, 3_600, 86_399, 86_400, 31 * 86_400 + 7_200].map(|ago| age(at(0), at(ago)));
        assert_eq!(ages, ["0s", "59s", "1m", "59m", "1h 0m", "23h 59m", "1d 0h", "31d 2h"]);
        assert_eq!(age(at(90), at(0)), "in 1m");
    }
}
