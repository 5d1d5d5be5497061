//! A sendmail behind a socket, for those who run where a setuid or setgid program can't: the mail goes in, and what sendmail says and, in the
//! last line, its exit status come back. See `systemd/handoff-sendmail`.

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use super::child::{Limits, Runner};
use crate::store::{Error, ErrorKind};

/// How often to ask whether we are told to stop.
const BEAT: Duration = Duration::from_millis(200);
/// More than a sendmail has to say.
const MAX_ANSWER: u64 = 64 * 1024;

/// Whether there is a socket.
pub(super) fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// Passes a mail on.
///
/// # Errors
/// If sendmail did not accept it, or nobody can tell.
pub(super) fn send(path: &Path, mail: &[u8], runner: &mut Runner, limits: Limits) -> Result<(), Error> {
    let answer = ask(path, mail, runner, limits).map_err(|error| Error::io(path, "passes no mail on", error))?;
    let answer = String::from_utf8_lossy(&answer);
    let answer = answer.trim_end();
    let (said, status) = answer.rsplit_once('\n').unwrap_or(("", answer));
    let said = said.trim();
    let why = match status.parse::<u8>() {
        Ok(0) => return Ok(()),
        Ok(status) if said.is_empty() => format!("failed (exit status: {status})"),
        Ok(status) => format!("failed (exit status: {status}): {said}"),
        Err(_) if answer.is_empty() => "says nothing".to_owned(),
        Err(_) => format!("does not say how it ended: {answer}"),
    };
    Err(Error::new(ErrorKind::Io, path, why).advise("journalctl -u 'handoff-sendmail@*' may tell more"))
}

fn ask(path: &Path, mail: &[u8], runner: &mut Runner, limits: Limits) -> io::Result<Vec<u8>> {
    let mut end = limits.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut socket = UnixStream::connect(path)?;
    socket.set_write_timeout(limits.timeout)?;
    // Who does not want all of it says why.
    match socket.write_all(mail).and_then(|()| socket.shutdown(Shutdown::Write)) {
        Err(error) if !is_gone(&error) => return Err(error),
        _ => {}
    }
    socket.set_read_timeout(Some(BEAT))?;
    let mut answer = Vec::new();
    let mut is_told = false;
    loop {
        match (&mut socket).take(MAX_ANSWER).read_to_end(&mut answer) {
            Ok(_) => return Ok(answer),
            Err(error) if is_gone(&error) => return Ok(answer),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if !is_told && runner.is_told_to_stop() {
            is_told = true;
            let latest = Instant::now() + limits.stop_timeout;
            end = Some(end.map_or(latest, |end| end.min(latest)));
        }
        if end.is_some_and(|end| Instant::now() >= end) {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Whether the other side has ended without reading all that it was sent.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected)
}
