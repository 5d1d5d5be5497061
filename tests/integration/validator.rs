//! A strict reader of textfile content: it refuses what makes node_exporter drop a file, and also what node_exporter and
//! promtool let pass though it is wrong.

use std::collections::{BTreeMap, BTreeSet};

use crate::exposition::{Sample, Series, parse_sample};

/// Panics if there is anything wrong with the content of a file.
pub(crate) fn assert_valid(file: &[u8], context: &str) {
    let problems = problems(file);
    assert!(problems.is_empty(), "{context}: {:#?}", &problems[..problems.len().min(20)]);
}

/// All that is wrong with the content of a file.
pub(crate) fn problems(content: &[u8]) -> Vec<String> {
    let mut problems = Vec::new();
    if content.starts_with(b"\xef\xbb\xbf") {
        problems.push("a byte order mark".to_owned());
    }
    if content.contains(&b'\r') {
        problems.push("a carriage return".to_owned());
    }
    if content.last() != Some(&b'\n') {
        problems.push("no final newline".to_owned());
    }
    let Ok(text) = std::str::from_utf8(content) else {
        problems.push("invalid UTF-8".to_owned());
        return problems;
    };
    if text.chars().any(|c| c.is_control() && c != '\n' && c != '\r') {
        problems.push("a control character".to_owned());
    }

    let mut families = Families::default();
    for (index, line) in text.split_terminator('\n').enumerate() {
        if line.ends_with([' ', '\t']) {
            problems.push(format!("line {}: a trailing space: {line:?}", index + 1));
        } else if let Err(problem) = families.add_line(line) {
            problems.push(format!("line {}: {problem}: {line:?}", index + 1));
        }
    }
    problems.extend(families.problems());
    problems
}

#[derive(Default)]
struct Families {
    by_name: BTreeMap<String, Family>,
    /// The family of the last line.
    current: String,
    series: BTreeSet<Series>,
}

#[derive(Default)]
struct Family {
    has_help: bool,
    kind: Option<String>,
    samples: Vec<Sample>,
}

impl Families {
    fn add_line(&mut self, line: &str) -> Result<(), String> {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').ok_or("HELP without a text")?;
            check_help(text)?;
            let family = self.enter(name)?;
            if std::mem::replace(&mut family.has_help, true) {
                return Err("a second HELP".to_owned());
            }
            return if family.samples.is_empty() { Ok(()) } else { Err("HELP after samples".to_owned()) };
        }
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').ok_or("TYPE without a type")?;
            if !["counter", "gauge", "histogram"].contains(&kind) {
                return Err("an unknown type".to_owned());
            }
            let family = self.enter(name)?;
            if family.kind.replace(kind.to_owned()).is_some() {
                return Err("a second TYPE".to_owned());
            }
            return if family.samples.is_empty() { Ok(()) } else { Err("TYPE after samples".to_owned()) };
        }
        if line.is_empty() || line.starts_with('#') {
            return Err("neither HELP, TYPE nor a sample".to_owned());
        }
        self.add_sample(parse_sample(line)?)
    }

    fn add_sample(&mut self, sample: Sample) -> Result<(), String> {
        check_labels(&sample.labels)?;
        if sample.value.is_nan() {
            return Err("NaN".to_owned());
        }
        let name = self.family_of(&sample.name);
        if !self.series.insert(sample.series()) {
            return Err("a duplicate series".to_owned());
        }
        let family = self.enter(&name)?;
        let described = family.has_help && family.kind.is_some();
        if family.kind.as_deref() == Some("counter") && !(sample.value >= 0.0 && sample.value.is_finite()) {
            return Err("a counter that is negative or infinite".to_owned());
        }
        family.samples.push(sample);
        if described { Ok(()) } else { Err("a sample before its HELP and TYPE".to_owned()) }
    }

    /// The family that a sample's name belongs to.
    fn family_of(&self, name: &str) -> String {
        if !self.by_name.contains_key(name) {
            for suffix in ["_bucket", "_sum", "_count"] {
                if let Some(base) = name.strip_suffix(suffix)
                    && self.by_name.get(base).is_some_and(Family::is_histogram)
                {
                    return base.to_owned();
                }
            }
        }
        name.to_owned()
    }

    /// The family of a line. One that was left before may not be entered again.
    fn enter(&mut self, name: &str) -> Result<&mut Family, String> {
        if self.current != name {
            if self.by_name.contains_key(name) {
                return Err("a family in several places".to_owned());
            }
            if !is_name(name, true) {
                return Err("an illegal metric name".to_owned());
            }
            name.clone_into(&mut self.current);
        }
        Ok(self.by_name.entry(name.to_owned()).or_default())
    }

    /// What can be told only when everything has been read.
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, family) in &self.by_name {
            if !family.has_help {
                problems.push(format!("{name}: no HELP"));
            }
            match family.kind.as_deref() {
                None => problems.push(format!("{name}: no TYPE")),
                Some("counter") if !name.ends_with("_total") => {
                    problems.push(format!("{name}: a counter without _total"));
                }
                Some("histogram") => {
                    for suffix in ["_bucket", "_sum", "_count"] {
                        if self.by_name.contains_key(&format!("{name}{suffix}")) {
                            problems.push(format!("{name}{suffix}: a family named like a part of a histogram"));
                        }
                    }
                    problems.extend(family.histogram_problems(name));
                }
                Some(_) => {}
            }
            if !family.is_histogram() && family.samples.iter().any(|sample| sample.label("le").is_some()) {
                problems.push(format!("{name}: `le` outside of a histogram"));
            }
        }
        problems
    }
}

/// The parts of one histogram.
#[derive(Default)]
struct Histogram {
    /// Upper bounds and cumulative counts, in the order of the file.
    buckets: Vec<(f64, f64)>,
    sum: Option<f64>,
    count: Option<f64>,
}

impl Family {
    fn is_histogram(&self) -> bool {
        self.kind.as_deref() == Some("histogram")
    }

    fn histogram_problems(&self, name: &str) -> Vec<String> {
        let mut problems = Vec::new();
        let mut histograms: BTreeMap<Series, Histogram> = BTreeMap::new();
        for sample in &self.samples {
            let mut key = Series { name: name.to_owned(), ..sample.series() };
            let bound = key.labels.remove("le");
            let histogram = histograms.entry(key).or_default();
            match (sample.name.strip_prefix(name), bound) {
                (Some("_bucket"), Some(bound)) => match bound.parse() {
                    Ok(bound) => histogram.buckets.push((bound, sample.value)),
                    Err(_) => problems.push(format!("{name}: a bucket whose `le` is no number: {bound:?}")),
                },
                (Some("_sum"), None) => histogram.sum = Some(sample.value),
                (Some("_count"), None) => histogram.count = Some(sample.value),
                _ => problems.push(format!("{name}: no part of a histogram: {}", sample.series())),
            }
        }
        for (series, histogram) in histograms {
            problems.extend(histogram.problems().into_iter().map(|problem| format!("{series}: {problem}")));
        }
        problems
    }
}

impl Histogram {
    fn problems(&self) -> Vec<&'static str> {
        let mut problems = Vec::new();
        if self.buckets.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
            problems.push("bounds that do not rise");
        }
        if self.buckets.windows(2).any(|pair| pair[0].1 > pair[1].1) {
            problems.push("buckets that are not cumulative");
        }
        if self.buckets.iter().any(|&(_, count)| count < 0.0) {
            problems.push("a negative bucket");
        }
        match self.buckets.last() {
            Some(&(bound, count)) if bound.is_infinite() && bound > 0.0 => {
                if self.count != Some(count) {
                    problems.push("a count that is not that of +Inf");
                }
            }
            _ => problems.push("no +Inf bucket at the end"),
        }
        if self.sum.is_none() {
            problems.push("no sum");
        }
        problems
    }
}

impl Sample {
    fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
    }
}

fn check_labels(labels: &[(String, String)]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for (name, _) in labels {
        if !is_name(name, false) {
            return Err("an illegal label name".to_owned());
        }
        if name.starts_with("__") {
            return Err("a reserved label name".to_owned());
        }
        if ["job", "instance"].contains(&name.as_str()) {
            return Err("a label of the target".to_owned());
        }
        if !seen.insert(name) {
            return Err("a label twice".to_owned());
        }
    }
    Ok(())
}

fn check_help(text: &str) -> Result<(), String> {
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character == '\\' && !matches!(characters.next(), Some('\\' | 'n')) {
            return Err("an escape in HELP that is none".to_owned());
        }
    }
    Ok(())
}

fn is_name(name: &str, colon: bool) -> bool {
    let is_letter = |c: char| c.is_ascii_alphabetic() || c == '_' || (colon && c == ':');
    name.starts_with(is_letter) && name.chars().all(|c| is_letter(c) || c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::problems;

    const GOOD: &str = "\
# HELP a_total Things with a \\\\ and a \\n.
# TYPE a_total counter
a_total{x=\"1\",y=\"\"} 3
a_total{x=\"quote \\\" backslash \\\\ newline \\n é \u{2028} {}\",y=\"2\"} 0
# HELP b A gauge.
# TYPE b gauge
b -1.5e-07
# HELP h_seconds Durations.
# TYPE h_seconds histogram
h_seconds_bucket{x=\"1\",le=\"10\"} 1
h_seconds_bucket{x=\"1\",le=\"30\"} 2
h_seconds_bucket{x=\"1\",le=\"+Inf\"} 2
h_seconds_sum{x=\"1\"} 12.5
h_seconds_count{x=\"1\"} 2
";

    #[test]
    fn good_content_is_accepted() {
        assert_eq!(problems(GOOD.as_bytes()), Vec::<String>::new());
    }

    #[test]
    fn each_fault_is_found_for_what_it_is() {
        // What to replace in the good content, by what, and a part of what should be said.
        let table = [
            ("b -1.5e-07\n", "b -1.5e-07 1764400000000\n", "a timestamp"),
            ("b -1.5e-07\n", "b -1.5e-07 0\n", "a timestamp"),
            ("h_seconds_count{x=\"1\"} 2\n", "h_seconds_count{x=\"1\"} 2", "no final newline"),
            ("b -1.5e-07\n", "b -1.5e-07\r\n", "a carriage return"),
            ("y=\"2\"", "y=\"\r\"", "a carriage return"),
            ("y=\"2\"", "y=\"\0\"", "a control character"),
            ("# HELP a_total", "\u{feff}# HELP a_total", "a byte order mark"),
            ("b -1.5e-07\n", "b -1.5e-07 \n", "a trailing space"),
            ("A gauge.\n", "A gauge. \n", "a trailing space"),
            ("b -1.5e-07\n", "b  -1.5e-07\n", "a timestamp"),
            ("b -1.5e-07\n", "b\t-1.5e-07\n", "no value"),
            ("b -1.5e-07\n", "b\n", "no value"),
            ("b -1.5e-07\n", "b one\n", "not a number"),
            ("b -1.5e-07\n", "b 1_0\n", "not a number"),
            ("b -1.5e-07\n", "b -1.5e-07\n\n", "neither HELP, TYPE nor a sample"),
            ("b -1.5e-07\n", "b -1.5e-07\n# a comment\n", "neither HELP, TYPE nor a sample"),
            ("# TYPE b gauge\n", "# HELP b A gauge.\n# TYPE b gauge\n", "a second HELP"),
            ("# TYPE b gauge\n", "# TYPE b gauge\n# TYPE b gauge\n", "a second TYPE"),
            ("# HELP b A gauge.\n", "", "no HELP"),
            ("# TYPE b gauge\n", "", "no TYPE"),
            ("# HELP b A gauge.\n# TYPE b gauge\n", "", "before its HELP and TYPE"),
            ("# TYPE b gauge\nb -1.5e-07\n", "b -1.5e-07\n# TYPE b gauge\n", "TYPE after samples"),
            (
                "# HELP b A gauge.\n# TYPE b gauge\nb -1.5e-07\n",
                "# TYPE b gauge\nb -1.5e-07\n# HELP b A gauge.\n",
                "HELP after samples",
            ),
            ("# TYPE b gauge\n", "# TYPE b untyped\n", "an unknown type"),
            ("# TYPE b gauge\n", "# TYPE b unknown\n", "an unknown type"),
            ("# HELP b A gauge.\n", "# HELP b\n", "HELP without a text"),
            ("A gauge.", "A \\gauge.", "an escape in HELP that is none"),
            ("y=\"2\"", "y=\"\\t\"", "an escape that is none"),
            ("y=\"2\"", "y=\"\\u0041\"", "an escape that is none"),
            ("y=\"2\"", "y=\"\\", "an escape that is none"),
            ("y=\"2\"", "y=2", "a label value without quotes"),
            ("y=\"2\"", "y=\"2", "an unclosed label value"),
            ("y=\"2\"}", "y=\"2\"", "labels without a comma"),
            ("y=\"2\"", "x=\"2\"", "a label twice"),
            ("y=\"2\"", "y-z=\"2\"", "an illegal label name"),
            ("y=\"2\"", "y.z=\"2\"", "an illegal label name"),
            ("y=\"2\"", "1y=\"2\"", "an illegal label name"),
            ("y=\"2\"", "y:z=\"2\"", "an illegal label name"),
            ("y=\"2\"", "=\"2\"", "an illegal label name"),
            ("y=\"2\"", "__name__=\"2\"", "a reserved label name"),
            ("y=\"2\"", "job=\"2\"", "a label of the target"),
            ("y=\"2\"", "instance=\"2\"", "a label of the target"),
            ("y=\"2\"", "le=\"2\"", "`le` outside of a histogram"),
            ("b -1.5e-07\n", "b -1.5e-07\nb-c 1\n", "an illegal metric name"),
            ("b -1.5e-07\n", "b -1.5e-07\n{x=\"1\"} 1\n", "an illegal metric name"),
            ("b -1.5e-07\n", "b -1.5e-07\nb 1\n", "a duplicate series"),
            (
                "a_total{x=\"1\",y=\"\"} 3\n",
                "a_total{y=\"\",x=\"1\"} 3\na_total{x=\"1\",y=\"\"} 3\n",
                "a duplicate series",
            ),
            ("b -1.5e-07\n", "b -1.5e-07\na_total 1\n", "a family in several places"),
            ("b -1.5e-07\n", "b -1.5e-07\n# TYPE a_total counter\n", "a family in several places"),
            ("a_total{x=\"1\",y=\"\"} 3\n", "a_total{x=\"1\",y=\"\"} -1\n", "a counter that is negative or infinite"),
            ("a_total{x=\"1\",y=\"\"} 3\n", "a_total{x=\"1\",y=\"\"} +Inf\n", "a counter that is negative or infinite"),
            ("# TYPE b gauge\n", "# TYPE b counter\n", "a counter without _total"),
            ("b -1.5e-07\n", "b NaN\n", "NaN"),
            ("h_seconds_sum{x=\"1\"} 12.5\n", "h_seconds_sum{x=\"1\"} NaN\n", "NaN"),
            ("le=\"30\"} 2\n", "le=\"30\"} 0\n", "buckets that are not cumulative"),
            ("le=\"10\"} 1\n", "le=\"10\"} -1\n", "a negative bucket"),
            ("le=\"30\"", "le=\"5\"", "bounds that do not rise"),
            ("le=\"30\"", "le=\"long\"", "a bucket whose `le` is no number"),
            (",le=\"30\"", "", "no part of a histogram"),
            ("h_seconds_bucket{x=\"1\",le=\"+Inf\"} 2\n", "", "no +Inf bucket"),
            ("le=\"+Inf\"} 2\n", "le=\"+Inf\"} 3\n", "a count that is not that of +Inf"),
            ("h_seconds_count{x=\"1\"} 2\n", "h_seconds_count{x=\"1\"} 1\n", "a count that is not that of +Inf"),
            ("h_seconds_count{x=\"1\"} 2\n", "", "a count that is not that of +Inf"),
            ("h_seconds_sum{x=\"1\"} 12.5\n", "", "no sum"),
            (
                "h_seconds_count{x=\"1\"} 2\n",
                "h_seconds_count{x=\"1\"} 2\n# HELP h_seconds_count Counts.\n# TYPE h_seconds_count gauge\nh_seconds_count 2\n",
                "a family named like a part of a histogram",
            ),
        ];
        for (good, bad, expected) in table {
            assert!(GOOD.contains(good), "{good:?} isn't in the good content");
            let found = problems(GOOD.replacen(good, bad, 1).as_bytes());
            let is_found = found.iter().any(|problem| problem.contains(expected));
            assert!(is_found, "{good:?} → {bad:?} should be {expected:?}, was {found:#?}");
        }
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let mut content = GOOD.as_bytes().to_vec();
        let place = GOOD.find("\"2\"").unwrap() + 1;
        content[place] = 0xff;
        assert_eq!(problems(&content), ["invalid UTF-8"]);
        assert_eq!(problems(b""), ["no final newline"]);
    }

    #[test]
    fn a_file_cut_anywhere_but_between_lines_is_refused() {
        for end in 1..GOOD.len() {
            if GOOD.is_char_boundary(end) && !GOOD[..end].ends_with('\n') {
                assert!(!problems(&GOOD.as_bytes()[..end]).is_empty(), "{:?}", &GOOD[..end]);
            }
        }
    }
}
