//! Messages of denials about companions: one wording, for the webhook and for the ValidatingAdmissionPolicy in
//! `deploy/`.

use crate::{
    keys::Keys,
    object::{Kind, ObjectKey},
    text::substitute,
};

/// [`Denial::Edit`](super::denial::Denial::Edit)
pub(crate) const EDIT: &str = "{kind} {namespace}/{name} is a companion, kept equal to {source} by Lockstep. \
    Change the source instead: kubectl edit {kind} {source name} -n {source namespace}";

/// [`Denial::Delete`](super::denial::Denial::Delete)
pub const DELETE: &str = "{kind} {namespace}/{name} is a companion, kept by Lockstep for as long as {source} wants it. \
    To remove it, delete the source or stop mirroring it: \
    kubectl label {kind} {source name} -n {source namespace} {managed}-";

/// [`Denial::Forged`](super::denial::Denial::Forged)
pub const FORGED: &str = "{kind} {namespace}/{name} carries the companion label or annotations of Lockstep; only Lockstep may set these. \
    Leave out {companion}; to mirror an object, label the original: kubectl label {kind} NAME {managed}=true";

/// [`Denial::Strip`](super::denial::Denial::Strip)
pub(crate) const STRIP: &str = "{kind} {namespace}/{name} is a companion of {source}; only Lockstep may remove its label {companion}. \
    To stop mirroring, unlabel the source: kubectl label {kind} {source name} -n {source namespace} {managed}-";

/// The webhook appends one of the next two to [`DELETE`]; the policy does not.
pub(crate) const OR_ALLOW_DELETES: &str = "; to allow deletes: \
    kubectl annotate --overwrite {kind} {source name} -n {source namespace} {protect}=edits";

/// For a name that does not end with the suffix.
pub(crate) const OR_RENAME: &str = "; to allow deletes, let its name end with {suffix}, \
    because nothing keeps other names free until Lockstep creates it again: \
    kubectl annotate {kind} {source name} -n {source namespace} {companion-name}-";

/// [`Denial::NameNeeded`](super::denial::Denial::NameNeeded)
pub(crate) const NAME_NEEDED: &str = "the name {namespace}/{name} is needed for the companion of {source}. \
    Choose another name, or another for the companion: \
    kubectl annotate --overwrite {kind} {source name} -n {source namespace} {companion-name}=NAME";

/// Fills in a message about the object `at`, a companion of `source`.
pub fn render(template: &str, keys: &Keys, at: &ObjectKey, source: Option<&ObjectKey>) -> String {
    let named = source.map(ToString::to_string);
    let pairs = [
        ("{kind}", kind(at.kind)),
        ("{namespace}", &at.namespace),
        ("{name}", &at.name),
        ("{source}", named.as_deref().unwrap_or("its source")),
        ("{source namespace}", source.map_or("NAMESPACE", |source| &source.namespace)),
        ("{source name}", source.map_or("NAME", |source| &source.name)),
        ("{managed}", &keys.managed),
        ("{companion}", &keys.companion),
        ("{companion-name}", &keys.companion_name),
        ("{protect}", &keys.protect),
        ("{suffix}", &keys.suffix),
    ];
    substitute(template, &pairs)
}

/// A kind as kubectl takes it.
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
    fn message_names_the_command_to_use_instead() {
        let at = ObjectKey::new(Kind::ConfigMap, "away", "colors-synced");
        let colors = ObjectKey::new(Kind::ConfigMap, "home", "colors");
        assert_eq!(
            render(EDIT, &keys(), &at, Some(&colors)),
            "configmap away/colors-synced is a companion, kept equal to home/colors by Lockstep. \
             Change the source instead: kubectl edit configmap colors -n home"
        );
        assert_eq!(
            render(DELETE, &keys(), &at, Some(&colors)),
            "configmap away/colors-synced is a companion, kept by Lockstep for as long as home/colors wants it. \
             To remove it, delete the source or stop mirroring it: \
             kubectl label configmap colors -n home workshop.io/managed-"
        );
        let secret = ObjectKey::new(Kind::Secret, "home", "token");
        assert_eq!(
            render(FORGED, &keys(), &secret, None),
            "secret home/token carries the companion label or annotations of Lockstep; only Lockstep may set these. \
             Leave out workshop.io/companion; to mirror an object, label the original: \
             kubectl label secret NAME workshop.io/managed=true"
        );
    }

    /// The CEL expression that yields a text: its words are literals, its placeholders variables of the
    /// policy.
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
    fn policy_has_the_same_messages() {
        let policy = include_str!("../../../../deploy/components/policy/policy.yaml");
        let found: Vec<String> = policy
            .split("messageExpression: >-")
            .skip(1)
            .map(|rest| rest.trim_start().split("\n    - ").next().unwrap())
            .map(|rest| rest.split("\n---").next().unwrap())
            .map(|folded| folded.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(found, [cel(EDIT), cel(STRIP), cel(DELETE), cel(FORGED)]);
    }
}
