//! What compaction removes and keeps, and that no counter falls.
