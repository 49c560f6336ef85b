//! The table of requests, as data. `<id>` stands for the id of the test's cluster: the same text serves both sides.

use serde_json::{Value, json};

use lockstep_core::admission::admission_request::KUBERNETES_CLEANUP_USERS;

/// Keeps an object that is being deleted, and its namespace with it.
pub const FINALIZER: &str = "example.com/held";
pub const EXEMPT_USER: &str = "operator";
pub const EXEMPT_GROUP: &str = "operators";

/// One request, by one user, about one object.
pub struct Row {
    pub user: User,
    pub kind: &'static str,
    pub object: Object,
    pub request: Request,
    /// The object's name. Each row has an object of its own, so that rows can run in any order.
    pub name: String,
}

/// A user whom the admin impersonates.
#[derive(Clone)]
pub struct User {
    pub id: &'static str,
    pub name: &'static str,
    pub groups: &'static [&'static str],
}

/// The object as it is before the request.
#[derive(Clone)]
pub struct Object {
    /// Objects of one class are expected to be treated alike.
    pub class: String,
    pub id: String,
    pub namespace: &'static str,
    pub state: State,
    /// What makes it different from a plain object, as a merge patch.
    pub overlay: Value,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum State {
    Absent,
    Present,
    /// Deleted, and held by a finalizer.
    Terminating,
}

#[derive(Clone)]
pub struct Request {
    /// Requests of one class are expected to be treated alike.
    pub class: &'static str,
    pub id: &'static str,
    pub method: Method,
    pub dry_run: bool,
    pub body: Value,
}

#[derive(Clone, Copy)]
pub enum Method {
    /// The body is a merge patch over a plain object.
    Create,
    MergePatch,
    StrategicPatch,
    JsonPatch,
    ServerSideApply,
    /// The body is a merge patch over the object as it is.
    Replace,
    Delete,
    DeleteCollection,
}

impl Row {
    pub fn id(&self) -> String {
        let Self { user, kind, object, request, .. } = self;
        format!("{} of {} ({kind}) by {}", request.id, object.id, user.id)
    }

    /// The id under which docs/reference.md names a difference.
    pub fn class(&self) -> String {
        format!("{}-of-{}", self.request.class, self.object.class)
    }
}

pub fn rows() -> Vec<Row> {
    let users = users();
    let editor = user(&users, "editor");
    let mut table = Table { rows: Vec::new() };
    for kind in ["configmap", "secret"] {
        for object in companions() {
            table.add(editor, kind, &object, requests(kind));
        }
        for object in new_objects() {
            table.add(editor, kind, &object, creations(&object));
        }
    }
    for object in other_objects() {
        table.add(editor, "configmap", &object, main_requests());
    }
    // A namespace that is being deleted loses its RoleBindings, so the admin asks.
    for object in objects_in_terminating_namespace() {
        table.add(user(&users, "cluster-admin"), "configmap", &object, main_requests());
    }
    let (companions, new_objects) = (companions(), new_objects());
    let companion = find(&companions, "companion-protect-all");
    let forged = find(&new_objects, "object-with-label");
    for user in users.iter().filter(|user| user.id != "editor") {
        let some = ["merge-patch", "removal-of-label", "delete", "delete-collection"];
        let requests = requests("configmap").into_iter().filter(|request| some.contains(&request.id));
        table.add(user, "configmap", companion, requests.collect());
        table.add(user, "configmap", forged, creations(forged));
    }
    table.rows
}

struct Table {
    rows: Vec<Row>,
}

impl Table {
    fn add(&mut self, user: &User, kind: &'static str, object: &Object, requests: Vec<Request>) {
        for request in requests {
            let suffixed = (object.id.starts_with("companion") && object.class != OTHER_NAME)
                || object.id.ends_with("with-suffix");
            let name = match &object.overlay["metadata"]["name"] {
                Value::String(name) => name.clone(),
                _ if suffixed => format!("row-{}-synced", self.rows.len()),
                _ => format!("row-{}", self.rows.len()),
            };
            self.rows.push(Row { user: user.clone(), kind, object: object.clone(), request, name });
        }
    }
}

fn user<'a>(users: &'a [User], id: &str) -> &'a User {
    users.iter().find(|user| user.id == id).expect("a user")
}

fn find<'a>(objects: &'a [Object], id: &str) -> &'a Object {
    objects.iter().find(|object| object.id == id).expect("an object")
}

pub fn users() -> Vec<User> {
    const ADMINS: &[&str] = &["system:masters"];
    let user = |id, name, groups| User { id, name, groups };
    let [garbage_collector, namespace_controller, controller_manager] = KUBERNETES_CLEANUP_USERS;
    vec![
        user("editor", "alice-<id>", &["developers"]),
        user("cluster-admin", "mallory", ADMINS),
        user("exempt-user", EXEMPT_USER, ADMINS),
        user("member-of-exempt-group", "carol", &[EXEMPT_GROUP, "system:masters"]),
        user("user-named-as-exempt-group", EXEMPT_GROUP, ADMINS),
        user("member-of-group-named-as-exempt-user", "carol", &[EXEMPT_USER, "system:masters"]),
        user("lockstep", "system:serviceaccount:lockstep-system:lockstep", ADMINS),
        user("other-account-of-same-namespace", "system:serviceaccount:lockstep-system:default", ADMINS),
        user("account-of-same-name-elsewhere", "system:serviceaccount:<id>-home:lockstep", ADMINS),
        user("garbage-collector", garbage_collector, ADMINS),
        user("namespace-controller", namespace_controller, ADMINS),
        user("controller-manager", controller_manager, ADMINS),
    ]
}

// --- objects

pub fn key(name: &str) -> String {
    format!("<id>.test/{name}")
}

fn label(name: &str, value: Value) -> Value {
    json!({"metadata": {"labels": {key(name): value}}})
}

fn annotation(name: &str, value: &str) -> Value {
    json!({"metadata": {"annotations": {key(name): value}}})
}

fn managed() -> Value {
    label("managed", json!("true"))
}

/// The marks of a companion of a source in `home`.
fn marks(source: &str, protect: &str) -> Value {
    json!({"metadata": {
        "labels": {
            key("companion"): "true", key("source-namespace"): "<id>-home", key("source-name"): source,
        },
        "annotations": {
            key("source"): format!("<id>-home/{source}"), key("source-uid"): "1", key("source-checksum"): "abc",
            key("protect"): protect,
        },
    }})
}

/// Merge patches, one after the other, over nothing: a null removes what an earlier one sets.
pub fn merged(patches: &[Value]) -> Value {
    let mut all = json!({});
    patches.iter().for_each(|patch| json_patch::merge(&mut all, patch));
    all
}

/// A whole object of this name, with what the overlay says.
pub fn whole(kind: &str, name: &str, overlay: &Value) -> Value {
    let plain = json!({
        "apiVersion": "v1", "kind": type_of(kind), "metadata": {"name": name}, "data": {"sky": "Ymx1ZQ=="},
    });
    merged(&[plain, overlay.clone()])
}

pub fn type_of(kind: &str) -> &'static str {
    if kind == "secret" { "Secret" } else { "ConfigMap" }
}

/// The class of companions whose name does not end with the suffix.
const OTHER_NAME: &str = "companion-with-other-name";

fn object(class: &str, id: &str, overlay: Value) -> Object {
    Object { class: class.to_owned(), id: id.to_owned(), namespace: "home", state: State::Present, overlay }
}

/// The sources in `home` whose companions the objects below are: one for each value of `protect`.
pub fn sources() -> [(&'static str, Value); 3] {
    ["edits", "all", "none"].map(|protect| (protect, merged(&[managed(), annotation("protect", protect)])))
}

fn companions() -> Vec<Object> {
    let companion = |protect: &str| {
        let id = format!("companion-protect-{protect}");
        object(&id, &id, marks(protect, protect))
    };
    ["edits", "all", "none"].map(companion).into()
}

fn other_objects() -> Vec<Object> {
    let edits = || marks("edits", "edits");
    let labelled = || label("companion", json!("true"));
    let without = |field: &str, name: &str| json!({"metadata": {field: {key(name): null}}});
    let protect_edits = |id, overlay| object("companion-protect-edits", id, overlay);
    let no_source = |id, overlay| object("companion-without-source", id, overlay);
    let no_label = |id, overlay| object("object-with-source-annotation", id, overlay);
    let terminating =
        |id, overlay| Object { state: State::Terminating, ..object("terminating-companion", id, overlay) };
    let overlong = format!("{:a<64}/x", "");
    vec![
        protect_edits("companion-without-protect", merged(&[edits(), without("annotations", "protect")])),
        protect_edits("companion-labelled-false", merged(&[edits(), label("companion", json!("false"))])),
        protect_edits("companion-labelled-as-source", merged(&[edits(), managed()])),
        protect_edits("companion-protect-edits-of-absent-source", marks("absent", "edits")),
        Object { namespace: "away", ..protect_edits("companion-in-other-namespace", edits()) },
        object(OTHER_NAME, "companion-with-other-name", edits()),
        object("companion-protect-all", "companion-protect-all-of-absent-source", marks("absent", "all")),
        object("companion-protect-none", "companion-protect-none-of-absent-source", marks("absent", "none")),
        object("companion-with-outdated-protect-none", "companion-outdated-none", marks("all", "none")),
        object("companion-with-outdated-protect-all", "companion-outdated-all", marks("none", "all")),
        terminating("terminating-companion-protect-edits", edits()),
        terminating("terminating-companion-protect-all", marks("all", "all")),
        no_source("label-only", labelled()),
        no_source("label-and-source-uid", merged(&[labelled(), annotation("source-uid", "1")])),
        no_source("label-and-malformed-source", merged(&[labelled(), annotation("source", "a b/c; rm -rf")])),
        no_source("label-and-overlong-source", merged(&[labelled(), annotation("source", &overlong)])),
        no_label("all-marks-but-label", merged(&[edits(), without("labels", "companion")])),
        no_label("source-annotation-only", annotation("source", "<id>-home/edits")),
        no_label("source-uid-only", annotation("source-uid", "1")),
        object("source", "source", managed()),
        object("plain-object", "plain-object", json!({})),
        object("plain-object", "plain-object-with-suffix", json!({})),
    ]
}

fn objects_in_terminating_namespace() -> Vec<Object> {
    let others = other_objects().into_iter();
    let others = others.filter(|object| ["label-only", "source", "plain-object"].contains(&&*object.id));
    let companions =
        companions().into_iter().map(|object| Object { class: "companion".to_owned(), ..object });
    let end = |object: Object| Object {
        class: format!("{}-in-terminating-namespace", object.class),
        id: format!("{}-in-terminating-namespace", object.id),
        namespace: "ending",
        state: State::Terminating,
        ..object
    };
    companions.chain(others).map(end).collect()
}

fn new_objects() -> Vec<Object> {
    let labelled = || label("companion", json!("true"));
    let generated = json!({"metadata": {"name": null, "generateName": GENERATED}});
    let new = |class, id, overlay| Object { state: State::Absent, ..object(class, id, overlay) };
    let taken = merged(&[
        managed(),
        annotation("target-namespaces", "<id>-home"),
        annotation("companion-name", "edits-synced"),
    ]);
    vec![
        new("plain-object", "plain-object", json!({})),
        new("plain-object", "object-with-suffix", json!({})),
        new("plain-object", "object-with-protect", annotation("protect", "none")),
        new("plain-object", "object-with-source-name", label("source-name", json!("edits"))),
        new(
            "object-with-name-of-companion",
            "object-with-name-of-companion",
            json!({"metadata": {"name": "edits-synced"}}),
        ),
        new("object-with-label", "object-with-label", labelled()),
        new("object-with-label", "object-with-label-and-generated-name", merged(&[labelled(), generated])),
        new(
            "object-with-label",
            "object-with-protect-none",
            merged(&[labelled(), annotation("protect", "none")]),
        ),
        new("object-with-label", "object-with-all-marks", marks("edits", "edits")),
        new("object-with-label", "source-with-label", merged(&[labelled(), managed()])),
        new("object-with-source-annotation", "object-with-source", annotation("source", "<id>-home/edits")),
        new("object-with-source-annotation", "object-with-source-uid", annotation("source-uid", "1")),
        new(
            "object-with-source-annotation",
            "source-with-source",
            merged(&[managed(), annotation("source", "x/y")]),
        ),
        new("source", "source", managed()),
        new("malformed-source", "malformed-source", merged(&[managed(), annotation("protect", "maybe")])),
        // In another namespace than the source that has the name: in the same one it would be handed over.
        Object { namespace: "away", ..new("source-with-taken-name", "source-with-taken-name", taken) },
    ]
}

/// The API server appends random characters to this.
pub const GENERATED: &str = "generated-";

// --- requests

fn creations(object: &Object) -> Vec<Request> {
    let create =
        |id, method, dry_run| Request { class: "create", id, method, dry_run, body: object.overlay.clone() };
    let mut requests = vec![create("dry-run-create", Method::Create, true)];
    // A server-side apply takes the name from the path.
    if object.overlay["metadata"]["generateName"].is_null() {
        requests.push(create("dry-run-server-side-apply", Method::ServerSideApply, true));
    }
    // Only one row can create an object of a given name.
    if object.overlay["metadata"]["name"].is_null() {
        requests.push(create("create", Method::Create, false));
    }
    requests
}

/// Requests about an object that exists.
fn requests(kind: &str) -> Vec<Request> {
    use Method::{Delete, DeleteCollection, JsonPatch, MergePatch, Replace, ServerSideApply, StrategicPatch};
    let request = |class, id, method, body| Request { class, id, method, dry_run: false, body };
    let dry_run = |class, id, method, body| Request { class, id, method, dry_run: true, body };
    let patch = |class, id, body| request(class, id, MergePatch, body);
    let metadata = |field: &str, value: Value| json!({"metadata": {field: value}});
    let data = || json!({"data": {"sky": "bWluZQ=="}});
    let same_data = json!({"data": {"sky": "Ymx1ZQ=="}});
    let operation = json!([{"op": "replace", "path": "/data/sky", "value": "bWluZQ=="}]);
    let last_applied = json!({"kubectl.kubernetes.io/last-applied-configuration": "{}"});
    let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}]);
    let no_label_but_source =
        json!({"metadata": {"labels": {key("companion"): null}, "annotations": {key("source"): "x/y"}}});
    let more_data = match kind {
        "configmap" => patch("edit", "binary-data", json!({"binaryData": {"x": "bWluZQ=="}})),
        _ => patch("edit", "string-data", json!({"stringData": {"sky": "mine"}})),
    };
    vec![
        patch("edit", "merge-patch", data()),
        request("edit", "strategic-patch", StrategicPatch, data()),
        request("edit", "json-patch", JsonPatch, operation),
        request("edit", "replace", Replace, data()),
        request("edit", "apply", StrategicPatch, merged(&[data(), metadata("annotations", last_applied)])),
        request("edit", "server-side-apply", ServerSideApply, data()),
        dry_run("edit", "dry-run-merge-patch", MergePatch, data()),
        dry_run("edit", "dry-run-server-side-apply", ServerSideApply, data()),
        more_data,
        patch("edit", "removal-of-data", json!({"data": null})),
        patch("edit", "label", metadata("labels", json!({"team": "mine"}))),
        patch("edit", "annotate", metadata("annotations", json!({"team": "mine"}))),
        patch("edit", "immutable", json!({"immutable": true})),
        patch("edit", "finalizer", metadata("finalizers", json!([FINALIZER, "example.com/other"]))),
        patch("edit", "owner", metadata("ownerReferences", owner)),
        patch("edit", "generate-name", metadata("generateName", json!("x-"))),
        patch("edit", "self-link", metadata("selfLink", json!("/x"))),
        patch("edit", "change-of-checksum", annotation("source-checksum", "mine")),
        patch("edit", "change-of-protect", annotation("protect", "none")),
        patch("edit", "change-of-source-name", label("source-name", json!("mine"))),
        patch("edit", "removal-of-source-namespace", label("source-namespace", Value::Null)),
        patch("edit", "removal-of-source", metadata("annotations", json!({key("source"): null}))),
        patch("mark", "change-of-source", annotation("source", "x/y")),
        patch("mark", "change-of-source-uid", annotation("source-uid", "2")),
        patch("mark", "change-of-label", label("companion", json!("other"))),
        patch("mark", "removal-of-label-and-change-of-source", no_label_but_source),
        patch("strip", "removal-of-label", label("companion", Value::Null)),
        patch("strip", "removal-of-all-marks", json!({"metadata": {"labels": null, "annotations": null}})),
        request("strip", "replace-without-label", Replace, label("companion", Value::Null)),
        patch("source-label", "label-as-source", managed()),
        patch("no-change", "empty-patch", json!({})),
        request("no-change", "replace-by-same", Replace, json!({})),
        request("no-change", "server-side-apply-of-same", ServerSideApply, same_data),
        patch("no-change", "reset-of-managed-fields", metadata("managedFields", json!([{}]))),
        request("delete", "delete", Delete, json!({})),
        request("delete", "delete-orphan", Delete, json!({"propagationPolicy": "Orphan"})),
        request("delete", "delete-foreground", Delete, json!({"propagationPolicy": "Foreground"})),
        request("delete", "delete-collection", DeleteCollection, json!({})),
        dry_run("delete", "dry-run-delete", Delete, json!({})),
        dry_run("delete", "dry-run-delete-collection", DeleteCollection, json!({})),
    ]
}

/// Those that show how an object is treated, one or two of each class.
fn main_requests() -> Vec<Request> {
    let main = [
        "merge-patch",
        "server-side-apply",
        "label",
        "change-of-source",
        "change-of-label",
        "removal-of-label",
        "label-as-source",
        "server-side-apply-of-same",
        "delete",
        "delete-collection",
    ];
    requests("configmap").into_iter().filter(|request| main.contains(&request.id)).collect()
}
