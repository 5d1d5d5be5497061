//! Compaction beside workers that append without the lock and rewrite in place: no line is lost.
