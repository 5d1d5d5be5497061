//! Reading Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt;

/// A name and its labels, sorted: two texts for the same series are equal here.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
}

impl Series {
    pub(crate) fn new(name: &str, labels: &[(&str, &str)]) -> Self {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Self { name: name.to_owned(), labels }
    }

    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.name, self.labels)
    }
}

/// The values of a text.
pub(crate) type Samples = BTreeMap<Series, f64>;

/// One sample as it stands in a line, which may be wrong in other ways than its syntax.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: Vec<(String, String)>,
    pub(crate) value: f64,
}

impl Sample {
    pub(crate) fn series(&self) -> Series {
        Series { name: self.name.clone(), labels: self.labels.iter().cloned().collect() }
    }
}

/// The samples of a text whose syntax must be right.
pub(crate) fn parse(content: &[u8]) -> Samples {
    let text = std::str::from_utf8(content).expect("metrics are UTF-8");
    let mut samples = Samples::new();
    for line in text.split_terminator('\n').filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let sample = parse_sample(line).unwrap_or_else(|problem| panic!("{problem}: {line:?}"));
        assert!(samples.insert(sample.series(), sample.value).is_none(), "twice: {line:?}");
    }
    samples
}

/// Reads a line without its `\n` as a sample.
pub(crate) fn parse_sample(line: &str) -> Result<Sample, String> {
    let name_end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(name_end);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once('=').ok_or("unclosed labels")?;
            let (value, after) = unquote(after)?;
            labels.push((label.to_owned(), value));
            rest = match after.strip_prefix(',') {
                Some(after) => after,
                None if after.starts_with('}') => after,
                None => return Err("labels without a comma between them".to_owned()),
            };
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').ok_or("not just one space before the value")?;
    Ok(Sample { name: name.to_owned(), labels, value: number(value)? })
}

/// Reads a quoted string and returns what follows it.
fn unquote(text: &str) -> Result<(String, &str), String> {
    let mut characters = text.strip_prefix('"').ok_or("a label value without quotes")?.chars();
    let mut value = String::new();
    loop {
        match characters.next().ok_or("an unclosed label value")? {
            '"' => return Ok((value, characters.as_str())),
            '\\' => value.push(match characters.next() {
                Some('\\') => '\\',
                Some('n') => '\n',
                Some('"') => '"',
                other => return Err(format!("an escape that is none: {other:?}")),
            }),
            character => value.push(character),
        }
    }
}

fn number(text: &str) -> Result<f64, String> {
    if text.contains(' ') {
        return Err("a timestamp".to_owned());
    }
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.e".contains(&byte));
    if !is_number && !["+Inf", "-Inf", "NaN"].contains(&text) {
        return Err(format!("not a number: {text:?}"));
    }
    text.parse().map_err(|error| format!("{error}: {text:?}"))
}

/// What differs between two texts, if anything does; floats must be the same to the bit.
pub(crate) fn differences(actual: &Samples, expected: &Samples) -> Vec<String> {
    let mut differences = Vec::new();
    for (series, &expected) in expected {
        match actual.get(series) {
            None => differences.push(format!("missing: {series} {expected}")),
            // Each side gives the float nearest to the exact value, so that they are the same to the bit.
            Some(&actual) if actual.to_bits() != expected.to_bits() => {
                differences.push(format!("{series} is {actual}, not {expected}"));
            }
            Some(_) => {}
        }
    }
    let unexpected = actual.iter().filter(|(series, _)| !expected.contains_key(series));
    differences.extend(unexpected.map(|(series, value)| format!("unexpected: {series} {value}")));
    differences
}

/// The value of a series; it must be there.
pub(crate) fn value(samples: &Samples, name: &str, labels: &[(&str, &str)]) -> f64 {
    let series = Series::new(name, labels);
    *samples.get(&series).unwrap_or_else(|| panic!("{series} is missing among {} series", samples.len()))
}

/// The sum over all series of a name that have these labels; 0 if there is none.
pub(crate) fn sum(samples: &Samples, name: &str, labels: &[(&str, &str)]) -> f64 {
    samples
        .iter()
        .filter(|(series, _)| series.name == name && labels.iter().all(|(key, value)| series.label(key) == Some(value)))
        .map(|(_, value)| value)
        // An empty sum of floats is -0.
        .fold(0.0, |sum, value| sum + value)
}

#[test]
fn samples_are_read_and_compared() {
    let samples = parse(b"# HELP a A.\na{y=\"2\\n\\\\\\\"\",x=\"1\"} 1.5e+3\nb 0\n");
    assert_eq!(samples.len(), 2);
    assert_eq!(value(&samples, "a", &[("x", "1"), ("y", "2\n\\\"")]).to_bits(), 1500.0_f64.to_bits());
    assert_eq!(differences(&samples, &samples), Vec::<String>::new());
    assert_eq!(differences(&samples, &parse(b"b 1\nc 0\n")).len(), 3);
    assert_eq!(differences(&parse(b"a 0.3\n"), &parse(b"a 3e-1\n")), Vec::<String>::new());
    assert_eq!(differences(&parse(b"a 0.3\n"), &parse(b"a 0.30000000000000004\n")).len(), 1);
}
