//! The real `prometheus-node-exporter` and `prometheus`, on loopback, for the time of a test.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::exposition::{Samples, Series, parse};
use crate::test_env::{Background, TestEnv, tool};

const PATIENCE: Duration = Duration::from_secs(60);

/// A server that answers on a port of loopback.
struct Service {
    process: Background,
    port: u16,
}

impl Service {
    /// Starts a server and waits until it answers `ready`. Its arguments may depend on its port.
    fn start(env: &TestEnv, program: &Path, ready: &str, arguments: impl Fn(u16) -> Vec<String>) -> Self {
        let log = env.path("service.log");
        // Somebody else may take the free port before the server does.
        for _ in 0..5 {
            let port = free_port();
            let mut command = env.command(program);
            command
                .args(arguments(port))
                .stdout(File::create(&log).unwrap())
                .stderr(File::options().append(true).open(&log).unwrap());
            let mut service = Self { process: Background::spawn(&mut command), port };
            let started = Instant::now();
            while !service.process.has_ended() {
                if service.get(ready).is_ok() && !service.process.has_ended() {
                    return service;
                }
                assert!(started.elapsed() < PATIENCE, "{} does not answer:\n{}", program.display(), read(&log));
                thread::sleep(Duration::from_millis(20));
            }
        }
        panic!("{} does not start:\n{}", program.display(), read(&log));
    }

    /// The body of the answer to a GET, if its status is 200.
    fn get(&self, path: &str) -> io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // HTTP/1.0, so that the answer comes in one piece and ends with the connection.
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\nAccept: */*\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8(answer).map_err(io::Error::other)?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| io::Error::other("no head"))?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        if status == "200" { Ok(body.to_owned()) } else { Err(io::Error::other(format!("{head}\n\n{body}"))) }
    }
}

/// `prometheus-node-exporter`, with its textfile collector on the textfile directory and no other.
pub(crate) struct NodeExporter(Service);

impl NodeExporter {
    pub(crate) fn start(env: &TestEnv) -> Self {
        let program = tool("prometheus-node-exporter", "prometheus-node-exporter");
        let directory = env.textfile_dir();
        Self(Service::start(env, &program, "/", |port| {
            vec![
                "--collector.disable-defaults".to_owned(),
                "--collector.textfile".to_owned(),
                format!("--collector.textfile.directory={}", directory.display()),
                format!("--web.listen-address=127.0.0.1:{port}"),
            ]
        }))
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.port
    }

    /// All that it serves.
    pub(crate) fn samples(&self) -> Samples {
        parse(self.0.get("/metrics").unwrap().as_bytes())
    }

    /// Asserts that it serves each sample of the file, without an error.
    pub(crate) fn assert_serves(&self, file: &Samples) {
        let served = self.samples();
        for name in ["node_textfile_scrape_error", "promhttp_metric_handler_errors_total"] {
            let errors: Vec<_> = served.iter().filter(|(series, _)| series.name == name).collect();
            assert!(!errors.is_empty(), "{name} is missing");
            assert!(errors.iter().all(|(_, value)| **value == 0.0), "{errors:?}");
        }
        assert_same(&served, file, "node_exporter");
    }
}

/// `prometheus`, scraping a node_exporter every second.
pub(crate) struct Prometheus(Service);

impl Prometheus {
    pub(crate) fn start(env: &TestEnv, node_exporter: &NodeExporter) -> Self {
        let program = tool("prometheus", "prometheus");
        let target = format!("127.0.0.1:{}", node_exporter.port());
        env.write(
            "prometheus.yml",
            format!(
                "global: {{scrape_interval: 1s}}\n\
                 scrape_configs: [{{job_name: node, static_configs: [{{targets: ['{target}']}}]}}]\n"
            ),
        );
        let (config, storage) = (env.path("prometheus.yml"), env.path("prometheus"));
        Self(Service::start(env, &program, "/-/ready", |port| {
            vec![
                format!("--config.file={}", config.display()),
                format!("--storage.tsdb.path={}", storage.display()),
                format!("--web.listen-address=127.0.0.1:{port}"),
            ]
        }))
    }

    /// What a query gives at this moment, without the target's labels.
    pub(crate) fn query(&self, query: &str) -> Samples {
        let body = self.0.get(&format!("/api/v1/query?query={}", percent_encoded(query))).unwrap();
        let answer: Value = serde_json::from_str(&body).unwrap();
        let result = answer["data"]["result"].as_array().expect("a query gives a vector");
        result.iter().map(sample).collect()
    }

    /// Waits for the first scrape and asserts that it brought each sample of the file.
    pub(crate) fn assert_has(&self, file: &Samples) {
        let started = Instant::now();
        // On a busy machine a scrape may time out, and its series are then stale: the last good one counts.
        while self.query("last_over_time(handoff_exporter_success[5m])").is_empty() {
            assert!(started.elapsed() < PATIENCE, "nothing has been scraped");
            thread::sleep(Duration::from_millis(100));
        }
        assert_same(&self.query("last_over_time({__name__=~'handoff_.+'}[5m])"), file, "Prometheus");
        let errors: Vec<f64> = self.query("last_over_time(node_textfile_scrape_error[5m])").into_values().collect();
        assert_eq!(errors, [0.0]);
    }
}

fn sample(entry: &Value) -> (Series, f64) {
    let value = entry["value"][1].as_str().and_then(|value| value.parse().ok()).expect("a value is a number in quotes");
    (series(entry), value)
}

/// Without the target's labels.
fn series(entry: &Value) -> Series {
    let mut labels: BTreeMap<String, String> = serde_json::from_value(entry["metric"].clone()).unwrap();
    let name = labels.remove("__name__").unwrap_or_default();
    labels.retain(|label, _| label != "job" && label != "instance");
    Series { name, labels }
}

/// Asserts that just the file's samples of this project have arrived.
fn assert_same(arrived: &Samples, file: &Samples, by: &str) {
    // To Prometheus an empty label and none are the same.
    let normal = |samples: &Samples| -> Samples {
        let ours = samples.iter().filter(|(series, _)| series.name.starts_with("handoff_"));
        ours.map(|(series, value)| {
            let mut series = series.clone();
            series.labels.retain(|_, value| !value.is_empty());
            (series, *value)
        })
        .collect()
    };
    let (arrived, sent) = (normal(arrived), normal(file));
    assert_eq!(sent.len(), file.len(), "the file's series are one only to some");
    let differences = crate::exposition::differences(&arrived, &sent);
    assert!(
        differences.is_empty(),
        "{by} has {} differences: {:#?}",
        differences.len(),
        &differences[..differences.len().min(10)]
    );
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        write!(encoded, "%{byte:02X}").unwrap();
        encoded
    })
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

impl Prometheus {
    /// Waits until a query gives just this one value.
    pub(crate) fn wait_for(&self, query: &str, value: f64) {
        let started = Instant::now();
        loop {
            let values: Vec<f64> = self.query(query).into_values().collect();
            if values.len() == 1 && (values[0] - value).abs() < 1e-6 {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "{query} does not become {value}: {values:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The samples, each with its time, that were scraped of a selector's series in the last five minutes.
    pub(crate) fn scraped(&self, selector: &str) -> BTreeMap<Series, Vec<(f64, f64)>> {
        let query = percent_encoded(&format!("{selector}[5m]"));
        let body = self.0.get(&format!("/api/v1/query?query={query}")).unwrap();
        let answer: Value = serde_json::from_str(&body).unwrap();
        let result = answer["data"]["result"].as_array().expect("a range gives a matrix");
        let pair = |pair: &Value| {
            let value = pair[1].as_str().and_then(|value| value.parse().ok());
            (pair[0].as_f64().unwrap(), value.expect("a value is a number in quotes"))
        };
        let pairs = |entry: &Value| entry["values"].as_array().unwrap().iter().map(pair).collect();
        result.iter().map(|entry| (series(entry), pairs(entry))).collect()
    }
}
