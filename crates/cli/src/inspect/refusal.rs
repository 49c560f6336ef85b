//! PURE. What the answer to a refused write says about webhooks: the API server names them in its message only.

use kube::core::Status;

/// A webhook that has refused a write, or could not be called.
pub struct RefusingWebhook<'a> {
    pub name: &'a str,
    /// What it said; none if it could not be called.
    pub denial: Option<&'a str>,
}

impl<'a> RefusingWebhook<'a> {
    pub fn of(status: &'a Status) -> Option<Self> {
        let (called, rest) = status.message.split_once(" webhook \"")?;
        let (name, rest) = rest.split_once('"')?;
        match called {
            "admission" => {
                let denial = rest.strip_prefix(" denied the request")?;
                Some(Self { name, denial: Some(denial.trim_start_matches(": ")) })
            }
            _ => called.ends_with("failed calling").then_some(Self { name, denial: None }),
        }
    }

    /// Whether it is one of an instance: the names of its webhooks end with its own.
    pub fn is_of(&self, instance: &str) -> bool {
        self.name.strip_suffix(instance).is_some_and(|prefix| prefix.ends_with('.'))
    }
}
