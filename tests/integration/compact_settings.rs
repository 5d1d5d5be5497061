//! The command line of handoff-compact: its messages, exit codes, plans and metrics.
