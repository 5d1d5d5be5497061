//! Compaction killed before each system call, and each of them failing: no record is lost or doubled, and the next run leaves no trace.
