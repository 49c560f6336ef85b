//! Webhook and policy answer alike: a table of requests is put to the webhook alone and to the policy alone, and every
//! difference is one that docs/reference.md names under "Where webhook and policy differ".

mod table;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use futures::{StreamExt, stream};
use serde_json::{Value, json};

use self::table::{
    EXEMPT_GROUP, EXEMPT_USER, FINALIZER, GENERATED, Method, Object, Request, Row, State, User, merged, rows,
    sources, type_of, users, whole,
};
use crate::harness::{Cluster, InstalledManifests, Lockstep, eventually};

/// Requests in flight, on each side.
const CONCURRENCY: usize = 12;
const EXEMPT: [&str; 4] = ["--exempt-user", EXEMPT_USER, "--exempt-group", EXEMPT_GROUP];
const REFERENCE: &str = include_str!("../../docs/reference.md");
const HEADING: &str = "#### Where webhook and policy differ";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn webhook_and_policy_differ_only_where_the_reference_says_so() {
    let rows = rows();
    let (protected, policed) =
        tokio::join!(Side::seed("webhookonly", &rows), Side::seed("policyonly", &rows));
    let (_webhooks, _lockstep) = protected.start_webhook().await;
    let _policy = policed.install_policy(&rows).await;
    let (by_webhook, by_policy) = tokio::join!(protected.answers(&rows), policed.answers(&rows));
    tokio::join!(protected.remove_finalizers(&rows), policed.remove_finalizers(&rows));

    let documented = documented(REFERENCE);
    let (mut seen, mut undocumented) = (BTreeSet::new(), Vec::new());
    for (row, (webhook, policy)) in rows.iter().zip(by_webhook.iter().zip(&by_policy)) {
        if webhook == policy {
            continue;
        }
        let difference = Difference {
            webhook_allows: *webhook == Answer::Allowed,
            policy_allows: *policy == Answer::Allowed,
        };
        if documented.get(&row.class()) != Some(&difference) {
            undocumented.push(format!(
                "{}: {}\n  webhook: {webhook}\n  policy: {policy}",
                row.class(),
                row.id()
            ));
        }
        seen.insert(row.class());
    }
    let stale: Vec<&String> = documented.keys().filter(|id| !seen.contains(*id)).collect();
    assert!(
        undocumented.is_empty() && stale.is_empty(),
        "of {} requests, {} are answered otherwise than docs/reference.md says:\n{}\n\
         it names differences that were not seen: {stale:?}",
        rows.len(),
        undocumented.len(),
        undocumented.join("\n")
    );
}

#[derive(PartialEq, Eq)]
enum Answer {
    Allowed,
    /// With the message after the API server's own words.
    Refused(String),
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allowed => f.write_str("allowed"),
            Self::Refused(message) => write!(f, "refused: {message}"),
        }
    }
}

/// How webhook and policy answer requests of one class. Where both refuse, their messages differ.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    webhook_allows: bool,
    policy_allows: bool,
}

/// The differences that the reference names, by id. A row of its table has one or more ids, what they are about, and
/// two columns that begin with `allowed` or `refused`.
fn documented(reference: &str) -> BTreeMap<String, Difference> {
    let (_, section) = reference.split_once(HEADING).expect("the heading");
    let lines = section.lines().skip_while(|line| !line.starts_with('|'));
    let mut documented = BTreeMap::new();
    for line in lines.take_while(|line| line.starts_with('|')).skip(2) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [ids, _, webhook, policy] = &*cells else { panic!("not four columns: {line}") };
        let allows = |cell: &str| {
            assert!(cell.starts_with("allowed") || cell.starts_with("refused"), "{cell}: {line}");
            cell.starts_with("allowed")
        };
        for id in ids.split(", ").map(|id| id.trim_matches('`').to_owned()) {
            let difference = Difference { webhook_allows: allows(webhook), policy_allows: allows(policy) };
            assert!(!documented.contains_key(&id), "{id} is named twice");
            documented.insert(id, difference);
        }
    }
    documented
}

/// The cluster as one of the two sees it: a domain and namespaces of its own, with the same objects.
struct Side {
    cluster: Cluster,
}

impl Side {
    /// Creates namespaces, sources and the object of each row. Nothing refuses anything yet.
    async fn seed(name: &str, rows: &[Row]) -> Self {
        let side = Self { cluster: Cluster::new(name).await };
        for namespace in ["home", "away", "ending"] {
            side.cluster.namespace(namespace).await;
        }
        side.cluster.cluster_editor("alice", &[]).await;
        for kind in ["configmap", "secret"] {
            for (name, overlay) in sources() {
                side.create(kind, "home", &whole(kind, name, &overlay)).await;
            }
        }
        let present = rows.iter().filter(|row| row.object.state != State::Absent);
        stream::iter(present).for_each_concurrent(CONCURRENCY, |row| side.create_object(row)).await;
        side.cluster.delete(&format!("/api/v1/namespaces/{}", side.cluster.ns("ending"))).await;
        side
    }

    async fn create_object(&self, row: &Row) {
        let Row { kind, object: Object { namespace, state, overlay, .. }, name, .. } = row;
        let mut object = whole(kind, name, overlay);
        if *state == State::Terminating {
            object["metadata"]["finalizers"] = json!([FINALIZER]);
        }
        self.create(kind, namespace, &object).await;
        // What is in `ending` goes with its namespace.
        if *state == State::Terminating && *namespace != "ending" {
            self.cluster.delete(&self.path(kind, namespace, name)).await;
        }
    }

    async fn create(&self, kind: &str, namespace: &str, object: &Value) {
        self.cluster.post(&self.collection(kind, namespace), &self.fill(object)).await;
    }

    /// Installs the webhooks and starts a webhook without a controller, which would repair what the rows do.
    async fn start_webhook(&self) -> (InstalledManifests, Lockstep) {
        self.cluster.install_and_start(&[&["--no-controller"], &EXEMPT[..]].concat()).await
    }

    /// Installs the policy without the webhooks, and waits until the API server goes by it.
    async fn install_policy(&self, rows: &[Row]) -> InstalledManifests {
        let url = self.cluster.url();
        let installed = self.cluster.install(&[&["--policy", "--webhook-url", &url], &EXEMPT[..]].concat());
        for kind in ["validating", "mutating"] {
            let path = format!("/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations");
            self.cluster.delete(&format!("{path}/lockstep.{}", self.cluster.domain())).await;
        }
        let probe = async |id: &str| {
            let mut present = rows.iter().filter(|row| row.object.state != State::Absent);
            let row = present.find(|row| row.object.id == id).expect("a row about this object");
            let path = self.path(row.kind, row.object.namespace, &row.name) + "?dryRun=All";
            let body = json!({"data": {"probe": "bWluZQ=="}});
            let body = Some(("application/merge-patch+json", &body));
            self.cluster.try_request("PATCH", &path, body).await.map(drop)
        };
        eventually("the policy protects companions", || async {
            (probe("companion-protect-edits").await == Err(403)).then_some(())
        })
        .await;
        eventually("the webhooks are gone", || async { probe("source").await.ok() }).await;
        eventually("the policy sees that a namespace is being deleted", || async {
            probe("companion-protect-edits-in-terminating-namespace").await.ok()
        })
        .await;
        installed
    }

    async fn answers(&self, rows: &[Row]) -> Vec<Answer> {
        stream::iter(rows).map(|row| self.answer(row)).buffered(CONCURRENCY).collect().await
    }

    /// Sends a row's request as its user.
    async fn answer(&self, row: &Row) -> Answer {
        let Row { user, kind, object: Object { namespace, .. }, request, name } = row;
        let Request { method, dry_run, body, .. } = request;
        let (collection, path) = (self.collection(kind, namespace), self.path(kind, namespace, name));
        let body = self.fill(body);
        let (verb, mut uri, content_type, body) = match method {
            Method::Create => {
                let object = self.fill(&whole(kind, name, &request.body));
                ("POST", collection + "?", "application/json", object)
            }
            Method::MergePatch => ("PATCH", path + "?", "application/merge-patch+json", body),
            Method::StrategicPatch => ("PATCH", path + "?", "application/strategic-merge-patch+json", body),
            Method::JsonPatch => ("PATCH", path + "?", "application/json-patch+json", body),
            Method::ServerSideApply => {
                let head = json!({"apiVersion": "v1", "kind": type_of(kind), "metadata": {"name": name}});
                let uri = path + "?fieldManager=somebody&force=true";
                ("PATCH", uri, "application/apply-patch+yaml", merged(&[head, body]))
            }
            Method::Replace => {
                let live = self.cluster.get(&path).await.expect("the row's object");
                ("PUT", path + "?", "application/json", merged(&[live, body]))
            }
            Method::Delete => ("DELETE", path + "?", "application/json", body),
            Method::DeleteCollection => {
                let uri = format!("{collection}?fieldSelector=metadata.name%3D{name}");
                ("DELETE", uri, "application/json", body)
            }
        };
        if *dry_run {
            uri += "&dryRun=All";
        }
        match self.send(user, verb, &uri, content_type, &body).await {
            Ok(()) => Answer::Allowed,
            Err(status) => {
                let message = status.message.replace(&self.cluster.id, "<id>");
                let after = |words| message.split_once(words).map(|(_, after)| after);
                let text = after("denied the request: ").or_else(|| after("denied request: "));
                // Anything else refuses on both sides, and the row shows nothing.
                let text = text.filter(|_| status.code == 403 && status.reason == "Forbidden");
                let text = text.unwrap_or_else(|| panic!("{}: {status:?}", row.id()));
                Answer::Refused(without_random_characters(text))
            }
        }
    }

    async fn send(
        &self,
        user: &User,
        verb: &str,
        uri: &str,
        content_type: &str,
        body: &Value,
    ) -> Result<(), Box<kube::core::Status>> {
        let mut request = http::Request::builder()
            .method(verb)
            .uri(uri)
            .header("content-type", content_type)
            .header("impersonate-user", user.name.replace("<id>", &self.cluster.id));
        for group in user.groups {
            request = request.header("impersonate-group", *group);
        }
        let request = request.body(body.to_string().into_bytes()).expect("a request");
        match self.cluster.client.request::<Value>(request).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) => Err(status),
            Err(error) => panic!("{verb} {uri}: {error}"),
        }
    }

    /// Lets go of what is being deleted.
    async fn remove_finalizers(&self, rows: &[Row]) {
        let held = rows.iter().filter(|row| row.object.state == State::Terminating);
        let patch = json!({"metadata": {"finalizers": null}});
        let exempt = users().into_iter().find(|user| user.name == EXEMPT_USER).expect("the exempt user");
        let remove = async |row: &Row| {
            let path = self.path(row.kind, row.object.namespace, &row.name);
            self.send(&exempt, "PATCH", &path, "application/merge-patch+json", &patch).await
        };
        stream::iter(held)
            .for_each_concurrent(CONCURRENCY, |row| async {
                remove(row).await.unwrap_or_else(|status| panic!("{}: {status:?}", row.id()));
            })
            .await;
    }

    fn collection(&self, kind: &str, namespace: &str) -> String {
        format!("/api/v1/namespaces/{}/{kind}s", self.cluster.ns(namespace))
    }

    fn path(&self, kind: &str, namespace: &str, name: &str) -> String {
        format!("{}/{name}", self.collection(kind, namespace))
    }

    fn fill(&self, value: &Value) -> Value {
        serde_json::from_str(&value.to_string().replace("<id>", &self.cluster.id)).expect("JSON")
    }
}

/// A text about an object whose name the API server has generated: five random characters go.
fn without_random_characters(text: &str) -> String {
    match text.split_once(GENERATED) {
        Some((before, after)) => format!("{before}{GENERATED}{}", &after[5..]),
        None => text.to_owned(),
    }
}
