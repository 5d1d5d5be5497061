//! Makes the man pages and the completions of all tools from their command lines, for the package.
//!
//! `cargo run --example package-files DIRECTORY` fills `man/` and `completions/` in there.

#![expect(clippy::disallowed_methods, reason = "a build that is interrupted is begun again")]

use std::fmt::Write;
use std::path::Path;
use std::{env, fs, io};

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

fn main() -> io::Result<()> {
    let Some(directory) = env::args_os().nth(1) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "say which directory is to be filled"));
    };
    let [man, completions] = ["man", "completions"].map(|name| Path::new(&directory).join(name));
    for directory in [&man, &completions] {
        fs::create_dir_all(directory)?;
    }
    for command in queue_format::cli::commands() {
        let name = command.get_name().to_owned();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut command.clone(), &name, &completions)?;
        }
        let mut command = command.disable_help_subcommand(true);
        command.build();
        write_pages(&command, &man)?;
    }
    Ok(())
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: &Command, directory: &Path) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let man = Man::new(command.clone()).title(&name);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    page.extend(command.get_after_help().map(|help| notes(&help.to_string())).unwrap_or_default().bytes());
    fs::write(directory.join(format!("{name}.1")), page)?;
    command.get_subcommands().try_for_each(|subcommand| write_pages(subcommand, directory))
}

/// What follows a command's options: each line is a paragraph, but for indented ones, which are a table.
fn notes(text: &str) -> String {
    let mut notes = ".SH NOTES\n".to_owned();
    for line in text.lines().filter(|line| !line.is_empty()) {
        // A dash is a hyphen to roff, and at the beginning of a line a dot or a quote is a request.
        let escaped = line.replace('\\', r"\e").replace('-', r"\-");
        let request = if line.starts_with(' ') { ".nf" } else { ".fi\n.PP" };
        let _ = writeln!(notes, "{request}\n\\&{escaped}");
    }
    notes
}
