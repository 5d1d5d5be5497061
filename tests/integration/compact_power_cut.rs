//! The power cut during a compaction: what is on the disk then is the old queue or the new one, whole.
