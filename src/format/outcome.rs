//! What came of a job: how a worker's command has ended, and what that makes of the record.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::transition::{Refusal, check_spend};

/// What came of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The result, as JSON text.
    pub result: Option<String>,
    /// What it cost, as JSON text.
    pub spend: Option<String>,
    /// The follow-up: an object with `kind`, `to` and `payload`, perhaps `run_id` and `correlation_id`, as JSON text.
    pub followup: Option<String>,
}

/// How a command has ended.
#[derive(Clone, Debug)]
pub struct Ending<'a> {
    /// Its exit code, or the name of the signal that has ended it.
    pub status: Result<i32, &'a str>,
    /// Why its worker has ended it, if it has.
    pub cut: Option<Cut>,
    /// Whether it has ended because it was told to stop together with its worker.
    pub is_stopped: bool,
    /// Its standard output, from its beginning.
    pub output: &'a [u8],
    /// Whether there was more.
    pub has_overflowed: bool,
    /// The end of its standard error.
    pub error_tail: &'a str,
}

/// Why a command was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// It took too long.
    Timeout,
    /// Its worker was told to stop.
    Stop,
}

/// What is to become of a record.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// It is finished.
    Done(Outcome),
    /// It is refused.
    Refused(Refusal),
    /// It is as if it had not been taken.
    HandedBack,
}

/// What becomes of a record whose command has ended like this.
#[must_use]
pub fn judge(ending: &Ending<'_>) -> Verdict {
    let output = read(ending);
    let spend = output.as_ref().ok().and_then(|output| output.spend.clone());
    let refused = |class: &str, what: String, is_retryable: bool| {
        let reason = match ending.error_tail.trim() {
            "" => what,
            tail => format!("{what}: {tail}"),
        };
        Verdict::Refused(Refusal { spend: spend.clone(), ..refusal(class, reason, is_retryable) })
    };
    let exit_code =
        |code: i32, is_retryable: bool| refused(&format!("exit_{code}"), format!("exit code {code}"), is_retryable);
    match (ending.cut, ending.status) {
        (Some(Cut::Timeout), _) => refused("timeout", "took longer than --timeout".to_owned(), true),
        // Who has ended because we said so may not have done anything.
        (Some(Cut::Stop), Ok(0)) if is_blank(ending.output) => Verdict::HandedBack,
        (_, Ok(0)) => output.map_or_else(|what| Verdict::Refused(bad_output(&what)), Verdict::Done),
        (_, Ok(code @ (65 | 75))) => exit_code(code, code == 75),
        (Some(Cut::Stop), _) => Verdict::HandedBack,
        _ if ending.is_stopped => Verdict::HandedBack,
        (None, Ok(code)) => exit_code(code, true),
        (None, Err(signal)) => {
            let class = format!("signal_{}", signal.trim_start_matches("SIG").to_ascii_lowercase());
            refused(&class, format!("ended by signal {signal}"), true)
        }
    }
}

/// A refusal for which nothing was spent.
#[must_use]
pub fn refusal(class: &str, reason: String, is_retryable: bool) -> Refusal {
    Refusal { reason, error_class: Some(class.to_owned()), is_retryable, spend: None }
}

/// Refuses a record whose command has put out what can't be accepted.
#[must_use]
pub fn bad_output(what: &str) -> Refusal {
    refusal("bad_output", format!("its output can't be accepted: {what}"), true)
}

fn is_blank(output: &[u8]) -> bool {
    output.trim_ascii().is_empty()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Output<'a> {
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    #[serde(borrow)]
    spend: Option<&'a RawValue>,
    #[serde(borrow)]
    followup: Option<&'a RawValue>,
}

/// Reads what came of a record from standard output; no output is no more than that.
fn read(ending: &Ending<'_>) -> Result<Outcome, String> {
    let output = ending.output;
    let begins_with = || format!(", beginning with: {}", String::from_utf8_lossy(&output[..output.len().min(200)]));
    if ending.has_overflowed {
        return Err(format!("there is more than {} bytes of it{}", output.len(), begins_with()));
    }
    if is_blank(output) {
        return Ok(Outcome::default());
    }
    // A derived implementation would also take an array.
    if !output.trim_ascii_start().starts_with(b"{") {
        return Err(format!("it is no JSON object{}", begins_with()));
    }
    let Output { result, spend, followup } = std::str::from_utf8(output)
        .map_err(|error| error.to_string())
        .and_then(|output| serde_json::from_str(output).map_err(|error| error.to_string()))
        .map_err(|error| format!("{error}{}", begins_with()))?;
    let text = |json: Option<&RawValue>| json.map(|json| json.get().to_owned());
    let outcome = Outcome { result: text(result), spend: text(spend), followup: text(followup) };
    outcome.spend.as_deref().map_or(Ok(()), check_spend)?;
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Ending<'static> =
        Ending { status: Ok(0), cut: None, is_stopped: false, output: b"", has_overflowed: false, error_tail: "" };

    /// `done`, `back`, or the class with `!` if trying again may help.
    fn short(ending: &Ending<'_>) -> String {
        match judge(ending) {
            Verdict::Done(_) => "done".to_owned(),
            Verdict::HandedBack => "back".to_owned(),
            Verdict::Refused(Refusal { error_class, is_retryable, .. }) => {
                error_class.unwrap_or_default() + if is_retryable { "!" } else { "" }
            }
        }
    }

    #[test]
    fn how_a_command_ends_decides() {
        let stop = Some(Cut::Stop);
        // By itself, together with its worker, ended by its worker when that was to stop, and when its time was up.
        for (status, output, expected) in [
            (Ok(0), "", ["done", "done", "back", "timeout!"]),
            (Ok(0), "{}", ["done", "done", "done", "timeout!"]),
            (Ok(0), "?", ["bad_output!", "bad_output!", "bad_output!", "timeout!"]),
            (Ok(65), "{}", ["exit_65", "exit_65", "exit_65", "timeout!"]),
            (Ok(75), "?", ["exit_75!", "exit_75!", "exit_75!", "timeout!"]),
            (Ok(1), "", ["exit_1!", "back", "back", "timeout!"]),
            (Ok(143), "{}", ["exit_143!", "back", "back", "timeout!"]),
            (Err("SIGTERM"), "", ["signal_term!", "back", "back", "timeout!"]),
            (Err("99"), "{}", ["signal_99!", "back", "back", "timeout!"]),
        ] {
            let ending = Ending { status, output: output.as_bytes(), ..PLAIN };
            let told = [
                short(&ending),
                short(&Ending { is_stopped: true, ..ending.clone() }),
                short(&Ending { cut: stop, is_stopped: true, ..ending.clone() }),
                short(&Ending { cut: Some(Cut::Timeout), ..ending.clone() }),
            ];
            assert_eq!(told, expected, "{ending:?}");
        }
    }

    #[test]
    fn a_refusal_says_what_was_written_to_standard_error_and_what_was_spent() {
        let ending = Ending { status: Ok(3), output: br#"{"spend":0.5}"#, error_tail: " no\n", ..PLAIN };
        let Verdict::Refused(refusal) = judge(&ending) else { panic!("{ending:?}") };
        assert_eq!((refusal.reason.as_str(), refusal.spend.as_deref()), ("exit code 3: no", Some("0.5")));
        // What can't be read is not believed in part.
        let ending = Ending { output: br#"{"spend":0.5"#, ..ending };
        assert!(matches!(judge(&ending), Verdict::Refused(Refusal { spend: None, .. })));
    }

    #[test]
    fn output_is_one_object_of_what_came_of_it() {
        let read = |output: &str| read(&Ending { output: output.as_bytes(), ..PLAIN });
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(read(" \n"), Ok(Outcome::default()));
        let all = Outcome { result: some("[1, 2]"), spend: some("0.50"), followup: some("{}") };
        assert_eq!(read(" {\"result\":[1, 2],\n\"spend\":0.50,\"followup\":{}}\n"), Ok(all));
        assert_eq!(read(r#"{"result":null}"#), Ok(Outcome::default()));
        for (output, what) in [
            ("[]", "it is no JSON object, beginning with: []"),
            ("{}{}", "trailing characters"),
            (r#"{"result":1,"result":2}"#, "duplicate field `result`"),
            (r#"{"results":1}"#, "unknown field `results`"),
            (r#"{"spend":"much"}"#, "the spend is neither"),
        ] {
            assert!(read(output).is_err_and(|error| error.starts_with(what)), "{output}: {:?}", read(output));
        }
        let ending = Ending { output: b"{}", has_overflowed: true, ..PLAIN };
        assert!(super::read(&ending).is_err_and(|error| error.starts_with("there is more than 2 bytes of it")));
    }
}
