//! Who may use the queue after a compaction: owner, mode, access control lists, links, mounts, full disks.
