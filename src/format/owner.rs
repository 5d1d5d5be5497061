//! The process that holds a record.

use serde::{Deserialize, Serialize};

/// A process, told from all others that there were or will be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Owner {
    /// The host's name.
    pub host: String,
    /// The boot of the host.
    pub boot_id: String,
    /// The process.
    pub pid: u32,
    /// When it began, in clock ticks since the boot.
    pub start_time: u64,
    /// The namespace in which `pid` means it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u64>,
}

impl Owner {
    /// Reads one from JSON; `None` if it does not have the format's shape.
    #[must_use]
    pub fn read(json: &str) -> Option<Self> {
        // A derived implementation would also take an array.
        json.starts_with('{').then(|| serde_json::from_str(json).ok())?
    }

    /// The JSON of it.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}
