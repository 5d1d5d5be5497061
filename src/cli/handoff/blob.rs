//! `handoff blob`: the blobs that handles in the queue stand for.

use std::fmt::Write;

use clap::Subcommand;
use serde_json::{Value, json};

use super::{Output, Place};
use crate::cli::exit::Exit;
use crate::cli::job::{count, size};
use crate::cli::messages;
use crate::format::blob::Digest;
use crate::format::time::Timestamp;
use crate::store::blob::{Blob, BlobStore};
use crate::store::blob_check::{self, Forged, Missing, Problems, Stats};
use crate::store::files::QueueFiles;
use crate::store::{Error, ErrorKind};

#[derive(Debug, Subcommand)]
pub(super) enum Blobs {
    /// Print a blob, and verify it while it is printed
    #[command(
        after_help = "Example: handoff blob cat blob/ab/abcd… | head\nExit codes: 0 printed, 65 damaged, 74 not there"
    )]
    Cat {
        #[command(flatten)]
        place: Place,

        /// The blob: the `artifact_ref` of its handle, or its `sha256`
        #[arg(value_name = "REF|SHA256", value_parser = digest)]
        blob: Digest,
    },

    /// List blobs that are missing, corrupt or orphaned, and handles that say what isn't so
    ///
    /// Reads every blob. Orphaned blobs are harmless: handoff-offload removes them in time. One that is just being put is orphaned too,
    /// until its line is written.
    #[command(
        after_help = "Example: handoff blob check --json | jq .missing\nExit codes: 0 all is well, 1 it is not, 74 or 75 there was no telling"
    )]
    Check {
        #[command(flatten)]
        place: Place,

        #[command(flatten)]
        output: Output,
    },

    /// Say how many blobs there are, and how large
    #[command(after_help = "Example: handoff blob stats --json | jq .orphaned.bytes")]
    Stats {
        #[command(flatten)]
        place: Place,

        #[command(flatten)]
        output: Output,
    },
}

impl Blobs {
    pub(super) fn place_mut(&mut self) -> &mut Place {
        match self {
            Self::Cat { place, .. } | Self::Check { place, .. } | Self::Stats { place, .. } => place,
        }
    }

    pub(super) fn run(&self) -> Result<Exit, Error> {
        match self {
            Self::Cat { place, blob } => cat(&place.files(), blob).map(|()| Exit::Done),
            Self::Check { place, output } => check(place, output),
            Self::Stats { place, output } => stats(place, output).map(|()| Exit::Done),
        }
    }
}

/// Prints a blob.
fn cat(files: &QueueFiles, blob: &Digest) -> Result<(), Error> {
    let store = BlobStore::open(&files.blobs)?;
    if store.read(blob, messages::print)?.is_some() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Io, &store.path_of(blob), "is not there")
        .advise("if this is the right store (--queue, --blob-dir), restore it from a backup; handoff blob check tells what refers to it"))
}

fn check(place: &Place, output: &Output) -> Result<Exit, Error> {
    let files = place.files();
    let problems = blob_check::check(&files, &place.common.read_options())?;
    messages::print(if output.json { problems_as_json(&problems) } else { problems_as_text(&problems) }.as_bytes())?;
    place.warn_without_queue(problems.has_queue);
    let blobs = count(problems.usage.objects, "blob");
    place.messages().notice(format_args!(
        "{}: {blobs}, {}: {} missing, {} corrupt, {} orphaned; {} forged",
        files.blobs.display(),
        size(problems.usage.bytes),
        problems.missing.len(),
        problems.corrupt.len(),
        problems.orphaned.len(),
        count(problems.forged.len() as u64, "handle"),
    ));
    Ok(if problems.is_empty() { Exit::Done } else { Exit::No })
}

fn problems_as_text(problems: &Problems) -> String {
    let mut text = String::new();
    for Missing { digest, path, line } in &problems.missing {
        let place = line.map_or_else(String::new, |line| format!(":{line}"));
        let _ = writeln!(text, "missing {}: {}{place} refers to it", digest.reference(), path.display());
    }
    for (_, what) in &problems.corrupt {
        let _ = writeln!(text, "corrupt {what}");
    }
    for Forged { path, line, id, what } in &problems.forged {
        let record = id.as_ref().map_or_else(String::new, |id| format!(" record {}:", id.escape_debug()));
        let _ = writeln!(text, "forged {}:{line}:{record} {what}", path.display());
    }
    for Blob { digest, bytes, modified } in &problems.orphaned {
        let _ = writeln!(text, "orphaned {}: {}, put {modified}", digest.reference(), size(*bytes));
    }
    text
}

fn problems_as_json(problems: &Problems) -> String {
    let missing = problems.missing.iter().map(|Missing { digest, path, line }| {
        json!({ "artifact_ref": digest.reference(), "file": path.to_string_lossy(), "line": line })
    });
    let corrupt =
        problems.corrupt.iter().map(|(digest, what)| json!({ "artifact_ref": digest.reference(), "problem": what }));
    let forged = problems.forged.iter().map(|Forged { path, line, id, what }| {
        json!({ "file": path.to_string_lossy(), "line": line, "id": id.as_deref(), "problem": what })
    });
    let orphaned = problems.orphaned.iter().map(|Blob { digest, bytes, modified }| {
        json!({ "artifact_ref": digest.reference(), "bytes": bytes, "put_timestamp_seconds": modified.as_seconds() })
    });
    let json = json!({
        "objects": problems.usage.objects,
        "bytes": problems.usage.bytes,
        "missing": missing.collect::<Value>(),
        "corrupt": corrupt.collect::<Value>(),
        "forged": forged.collect::<Value>(),
        "orphaned": orphaned.collect::<Value>(),
    });
    format!("{json}\n")
}

fn stats(place: &Place, output: &Output) -> Result<(), Error> {
    let files = place.files();
    let stats = blob_check::stats(&files, &place.common.read_options())?;
    let Stats { usage, orphaned, largest_bytes, oldest, missing, has_queue } = stats;
    place.warn_without_queue(has_queue);
    if output.json {
        let json = json!({
            "store": files.blobs.to_string_lossy(),
            "objects": usage.objects,
            "bytes": usage.bytes,
            "largest_bytes": largest_bytes,
            "oldest_timestamp_seconds": oldest.map(Timestamp::as_seconds),
            "orphaned": { "objects": orphaned.objects, "bytes": orphaned.bytes },
            "missing": missing,
        });
        return messages::print(format!("{json}\n").as_bytes());
    }
    let mut text = format!("{}: {}, {}", files.blobs.display(), count(usage.objects, "blob"), size(usage.bytes));
    if let Some(oldest) = oldest {
        let _ = write!(text, ", the largest {}, the oldest from {oldest}", size(largest_bytes));
    }
    let orphans = count(orphaned.objects, "blob");
    let _ = writeln!(text, "\nnothing refers to {orphans}, {}", size(orphaned.bytes));
    let _ = writeln!(text, "missing {}", count(missing, "blob"));
    messages::print(text.as_bytes())
}

/// A blob as somebody names it.
fn digest(text: &str) -> Result<Digest, String> {
    let digest = Digest::parse_reference(text).or_else(|| Digest::parse_path(text)).or_else(|| Digest::parse(text));
    digest.ok_or_else(|| "neither blob/<aa>/<sha256> nor 64 lower-case hex digits".to_owned())
}
