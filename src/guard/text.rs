//! What people read who are refused a companion: one wording, for the guard and for the policy in `deploy/`.

use crate::{
    keys::Keys,
    object::{Kind, ObjectKey},
    substitute::substitute,
};

/// A companion was to be changed.
pub const EDIT: &str = "{kind} {namespace}/{name} is a companion, kept equal to {source} by Lockstep. \
    Change the source instead: kubectl edit {kind} {source name} -n {source namespace}";

/// A companion was to be deleted.
pub const DELETE: &str = "{kind} {namespace}/{name} is a companion, kept by Lockstep for as long as {source} wants it. \
    To remove it, delete the source or stop mirroring it: \
    kubectl label {kind} {source name} -n {source namespace} {managed}-";

/// Something was to pose as a companion.
pub const FORGED: &str = "{kind} {namespace}/{name} bears the marks of a companion, which only Lockstep writes. \
    Leave out {companion}; to mirror an object, label the original: kubectl label {kind} NAME {managed}=true";

/// A companion was to lose its label.
pub const STRIP: &str = "{kind} {namespace}/{name} is a companion of {source}, and its label shows it. \
    To stop mirroring, unlabel the source: kubectl label {kind} {source name} -n {source namespace} {managed}-";

/// A companion that is protected from deletes was to be deleted: what else can be done.
pub const OR_ALLOW_DELETES: &str = "; to allow deletes: \
    kubectl annotate --overwrite {kind} {source name} -n {source namespace} {protect}=edits";

/// Something was to take the name that a companion needs.
pub const SQUATTING: &str = "the name {namespace}/{name} is needed for the companion of {source}. \
    Choose another name, or another for the companion: \
    kubectl annotate --overwrite {kind} {source name} -n {source namespace} {companion-name}=NAME";

/// One of the texts above about the object `at`, whose `source` annotation is `source`.
#[must_use]
pub fn render(text: &str, keys: &Keys, at: &ObjectKey, source: Option<&str>) -> String {
    // Anybody may have written the annotation: it is repeated only where it names an object.
    let source = source.and_then(|source| ObjectKey::parse(at.kind, source));
    let named = source.as_ref().map(ToString::to_string);
    let pairs = [
        ("{kind}", kind(at.kind)),
        ("{namespace}", &at.namespace),
        ("{name}", &at.name),
        ("{source}", named.as_deref().unwrap_or("its source")),
        ("{source namespace}", source.as_ref().map_or("NAMESPACE", |source| &source.namespace)),
        ("{source name}", source.as_ref().map_or("NAME", |source| &source.name)),
        ("{managed}", &keys.managed),
        ("{companion}", &keys.companion),
        ("{companion-name}", &keys.companion_name),
        ("{protect}", &keys.protect),
    ];
    substitute(text, &pairs)
}

/// A kind as it is typed on the command line.
#[must_use]
pub const fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::ConfigMap => "configmap",
        Kind::Secret => "secret",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new("workshop.io", "-synced")
    }

    #[test]
    fn a_refusal_says_what_to_do_instead() {
        let at = ObjectKey::new(Kind::ConfigMap, "away", "colors-synced");
        assert_eq!(
            render(EDIT, &keys(), &at, Some("home/colors")),
            "configmap away/colors-synced is a companion, kept equal to home/colors by Lockstep. \
             Change the source instead: kubectl edit configmap colors -n home"
        );
        assert_eq!(
            render(DELETE, &keys(), &at, Some("home/colors")),
            "configmap away/colors-synced is a companion, kept by Lockstep for as long as home/colors wants it. \
             To remove it, delete the source or stop mirroring it: \
             kubectl label configmap colors -n home workshop.io/managed-"
        );
        let secret = ObjectKey::new(Kind::Secret, "home", "token");
        assert_eq!(
            render(FORGED, &keys(), &secret, None),
            "secret home/token bears the marks of a companion, which only Lockstep writes. \
             Leave out workshop.io/companion; to mirror an object, label the original: \
             kubectl label secret NAME workshop.io/managed=true"
        );
    }

    #[test]
    fn an_annotation_that_names_no_object_is_not_repeated() {
        let at = ObjectKey::new(Kind::ConfigMap, "away", "{name}");
        for source in [None, Some("; rm -rf /"), Some("home")] {
            assert_eq!(
                render(EDIT, &keys(), &at, source),
                "configmap away/{name} is a companion, kept equal to its source by Lockstep. \
                 Change the source instead: kubectl edit configmap NAME -n NAMESPACE"
            );
        }
    }

    /// The CEL expression that yields a text: its words are literals, its placeholders variables of the policy.
    fn cel(text: &str) -> String {
        let keys = keys();
        let text = substitute(text, &[("{managed}", &keys.managed), ("{companion}", &keys.companion)]);
        assert!(!text.contains(['\'', '\\']), "this would need escapes: {text}");
        let pairs = [
            ("{kind}", "' + variables.kind + '"),
            ("{namespace}", "' + request.namespace + '"),
            ("{name}", "' + variables.name + '"),
            ("{source}", "' + variables.source + '"),
            ("{source namespace}", "' + variables.sourceNamespace + '"),
            ("{source name}", "' + variables.sourceName + '"),
        ];
        let expression = format!("'{}'", substitute(&text, &pairs));
        substitute(&expression, &[("'' + ", ""), (" + ''", "")])
    }

    #[test]
    fn the_policy_says_the_same() {
        let policy = include_str!("../../deploy/components/policy/policy.yaml");
        let found: Vec<String> = policy
            .split("messageExpression: >-")
            .skip(1)
            .map(|rest| rest.trim_start().split("\n    - ").next().unwrap())
            .map(|rest| rest.split("\n---").next().unwrap())
            .map(|folded| folded.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(found, [cel(EDIT), cel(DELETE), cel(FORGED)]);
    }
}
