//! What the tests of webhook and policy start from: Alice, two namespaces, and sources with companions in them.

use serde_json::json;

use crate::{
    harness::{Cluster, eventually, secret},
    users::User,
};

impl Cluster {
    /// Creates the namespaces `home` and `away`, and Alice, who may write in both.
    pub(crate) async fn alice(&self) -> (String, String, User) {
        let (home, away) = (self.namespace("home").await, self.namespace("away").await);
        let alice = self.editor("alice", &["developers"], &[&home, &away]).await;
        (home, away, alice)
    }

    /// Creates the sources `colors`, with both namespaces as targets, and the Secret `key`, with these annotations.
    pub(crate) async fn make_sources(&self, home: &str, away: &str, annotations: &[(&str, &str)]) {
        let colors = self.source(home, "colors").annotate("target-namespaces", &format!(".,{away}"));
        let key = self.source(home, "key").secret("Opaque", json!({"key": "YmFzZTY0"}));
        for source in [colors, key] {
            annotations
                .iter()
                .fold(source, |source, (key, value)| source.annotate(key, value))
                .create()
                .await;
        }
    }

    /// Waits for the companions of these sources.
    pub(crate) async fn wait_companions(&self, home: &str, away: &str) {
        for namespace in [home, away] {
            self.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
        }
        let path = secret(home, "key-synced");
        eventually("the Secret's companion", || async { self.get(&path).await }).await;
    }
}
