//! The tools as their users run them: real processes, real files, real locks, and the real programs around them.
//!
//! A tool that a test needs and that is missing is a failure with the name of its package, never a test that is left out.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed, and that is all there is to say"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "the rules of src/ keep files whole and the environment in one place; tests lay out files and environments"
)]

mod beside_writers;
mod blob_commands;
mod check;
mod client_crash;
mod client_model;
mod client_power_cut;
mod client_races;
mod client_readme;
mod client_rules;
mod client_shell;
mod compact_attributes;
mod compact_crash;
mod compact_power_cut;
mod compact_races;
mod compact_retention;
mod compact_settings;
mod disk;
mod end_to_end;
mod exposition;
mod failures;
mod fixtures;
mod generations;
mod holdings;
mod hostile_labels;
mod kill_and_inject;
mod line_numbers;
mod notify;
mod offload_crash;
mod offload_failures;
mod offload_power_cut;
mod offload_races;
mod offload_readme;
mod offload_settings;
mod offload_values;
mod offloaded;
mod race;
mod reading;
mod services;
mod settings;
mod strace;
mod test_env;
mod validator;
mod work;
mod work_crash;
