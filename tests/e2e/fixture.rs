//! What guard and policy are tried on: Alice, two namespaces, and sources with companions in them.

use serde_json::json;

use crate::{
    harness::{Cluster, eventually, secret},
    users::User,
};

impl Cluster {
    /// The namespaces `home` and `away`, and Alice, who may write in both.
    pub async fn alice(&self) -> (String, String, User) {
        let (home, away) = (self.namespace("home").await, self.namespace("away").await);
        let alice = self.editor("alice", &["developers"], &[&home, &away]).await;
        (home, away, alice)
    }

    /// Sources: `colors`, for both namespaces, and the Secret `key`, with these annotations of ours.
    pub async fn make_sources(&self, home: &str, away: &str, asks: &[(&str, &str)]) {
        let colors = self.source(home, "colors").annotate("target-namespaces", &format!(".,{away}"));
        let key = self.source(home, "key").secret("Opaque", json!({"key": "YmFzZTY0"}));
        for source in [colors, key] {
            asks.iter().fold(source, |source, (key, value)| source.annotate(key, value)).create().await;
        }
    }

    /// Waits for the companions of these sources.
    pub async fn wait_companions(&self, home: &str, away: &str) {
        for namespace in [home, away] {
            self.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
        }
        let path = secret(home, "key-synced");
        eventually("the Secret's companion", || async { self.get(&path).await }).await;
    }
}
